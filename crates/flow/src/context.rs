//! The context of one request: the data that its prompts share and that every leg needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use http::HeaderValue;
use prometheus::Histogram;
use splitrail_kv::HashSeed;
use splitrail_telemetry::{LabelledSeries, Metrics};

use crate::prepare::{Preparer, Unit};
use crate::reply::keep_alive::LegActivity;
use splitrail_access::Tenant;
use splitrail_api::Endpoint;
use splitrail_api::memory_budget::Charge;
use splitrail_api::name::Name;
use splitrail_api::request::Options;
use splitrail_api::steering::Urgency;
use splitrail_config::model::RequestFlow;
pub use splitrail_engine_client::ReplyRoom;
use splitrail_fleet::{LegLimit, ServedModel, Worker};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::leg::LegKind;
use splitrail_ledger::timeline::{LegSpan, PromptClock, Stage, StageTime, Timeline};

/// The data that all prompts of one request share.
pub struct Context {
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// The preparer of the request. It also runs work off the reactor.
    pub preparer: Arc<Preparer>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// The model.
    pub served: Arc<ServedModel>,
    /// The charge for the memory that the request holds. What outlives the request and holds its body
    /// keeps the charge.
    pub memory: Arc<Charge>,
    /// The endpoint to which the client sent the request.
    pub endpoint: Endpoint,
    /// How the client wants the request answered: streamed or not, number of samples, and so on.
    pub options: Options,
    /// The flow that is planned for the request.
    pub flow: RequestFlow,
    /// The cache hit threshold that the client asked for, from 0 to 1, if any.
    pub threshold: Option<f64>,
    /// The request id that the client sees.
    pub request_id: Name,
    /// The W3C trace context that is sent to engines: that of the request's span if the request is
    /// traced, and that of the client otherwise. A traced leg replaces it with its own.
    pub traceparent: Option<HeaderValue>,
    /// What belongs to `traceparent`, if the request is traced.
    pub tracestate: Option<HeaderValue>,
    /// The routers that the request has come through, as a value of `via`.
    pub via: Option<HeaderValue>,
    /// The tenant of the request; `None` if the router has no tenants.
    pub tenant: Option<Arc<Tenant>>,
    /// The urgency of the request; it counts while the request waits in the queue.
    pub urgency: Urgency,
    /// The times of the request.
    pub timeline: Arc<Timeline>,
    /// Whether events are passed on as messages of gRPC, so that their members need the types that
    /// they have in OpenAI's API.
    pub converts_events: bool,
    /// What the reply takes of the bound on unread replies of its connection, and of the memory of
    /// its client.
    pub unread: ReplyRoom,
    /// Whether an attempt used a kept connection that had ended, or that carried the reply to
    /// another request. Further attempts then use new connections, because other kept connections
    /// may have the same fault.
    pub distrusts_kept_connections: AtomicBool,
    /// Whether an attempt was given up because its engine was late.
    pub was_late: AtomicBool,
    /// What the legs tell about their work, if the client is to see that before the reply begins.
    pub activity: Option<Arc<LegActivity>>,
}

/// One prompt of a request, with the data that all of its legs need.
#[derive(Clone, Copy)]
pub(crate) struct PromptContext<'a> {
    /// The data that all prompts of the request share.
    pub(crate) context: &'a Arc<Context>,
    /// The prepared prompt.
    pub(crate) unit: &'a Unit,
    /// The prompt's decision record.
    pub(crate) decision: &'a DecisionHandle,
    /// The prompt's clock.
    pub(crate) clock: &'a PromptClock,
}

impl PromptContext<'_> {
    /// Records that a stage of the prompt ends now. Returns the present time, which is the start of
    /// the next stage.
    pub(crate) fn mark(&self, stage: Stage) -> Instant {
        let now = Instant::now();
        let StageTime { stage: took, hand_off } = self.clock.end_stage(stage, now);
        let Context { metrics, served, options, endpoint, .. } = self.context.as_ref();
        let LabelledSeries { model, series } = served.labelled_series();
        let (name, seconds) = (stage.name(), took.as_secs_f64());
        let stream = if options.stream { "true" } else { "false" };
        match stage {
            Stage::Receive | Stage::Tokenize | Stage::Match | Stage::Pick => {
                series.router_stage(metrics, model, name, seconds);
            }
            Stage::Admit => series.queue_wait(metrics, model, stream, seconds),
            // Requests that generate nothing have no first token.
            _ if endpoint.generates() => {
                series.engine_stage(metrics, model, name, stream, seconds);
            }
            _ => {}
        }
        let follows = options.stream && !served.config.connector.is_concurrent();
        if let Some(hand_off) = hand_off.filter(|_| follows) {
            series.handed_off(metrics, model, hand_off.as_secs_f64());
        }
        now
    }

    /// Begins a leg on a worker.
    pub(crate) fn leg(&self, kind: LegKind, worker: &Worker) -> LegSpan {
        self.clock.leg(kind, worker.id(), rand::random)
    }
}

impl Context {
    /// The histogram of the time between the events of a reply.
    pub(crate) fn inter_token(&self, decision: &DecisionHandle) -> Histogram {
        let flow = decision.with(|decision| decision.flow);
        self.served.series.inter_token(&self.metrics, self.served.name(), flow)
    }

    /// The limit of a leg whose first event or hand-off is waited for, and that is predicted to take
    /// this long until then.
    pub(crate) fn first_token_limit(&self, predicted: Duration) -> LegLimit {
        let duration = self.served.config.timeouts.first_token;
        self.extended(LegLimit { duration, key: "timeouts.first_token" }.at_least(predicted))
    }

    /// The limit of a leg with a whole reply.
    pub(crate) fn reply_limit(&self) -> LegLimit {
        LegLimit { duration: self.served.config.timeouts.reply, key: "timeouts.reply" }
    }

    /// The limit of a prefill leg that is predicted to take this long.
    pub(crate) fn prefill_limit(&self, predicted: Duration) -> LegLimit {
        let duration = self.served.config.timeouts.prefill;
        self.extended(LegLimit { duration, key: "timeouts.prefill" }.at_least(predicted))
    }

    /// Once an attempt was late, the prompt may just take long: the next one gets more time.
    fn extended(&self, limit: LegLimit) -> LegLimit {
        if self.was_late.load(Relaxed) { limit.at_least(limit.duration) } else { limit }
    }
}
