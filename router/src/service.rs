//! A request from its body to its reply: the core that HTTP and gRPC share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use http::HeaderValue;
use prometheus::IntGauge;
use tokio::sync::OwnedSemaphorePermit;

use crate::api::Endpoint;
use crate::core::{Core, LiveRequest, Served, unix_ms};
use crate::error::Error;
use crate::flow::answer::Begun;
use crate::flow::context::{Context, flow_name};
use crate::flow::run::begin;
use crate::ledger::decisions::{Decision, DecisionHandle};
use crate::prepare::{Prepared, Unit, prepare};
use crate::reply::merge::{self, Events};
use crate::stages::Stages;

/// A request as it came through a door.
pub struct Call {
    /// Where it came in.
    pub endpoint: Endpoint,
    /// Its body.
    pub body: Bytes,
    /// The id that the client sees.
    pub request_id: String,
    /// W3C trace context.
    pub traceparent: Option<HeaderValue>,
    /// When it arrived.
    pub arrived: Instant,
}

/// What the client gets.
pub struct Reply {
    /// How it was routed.
    pub route: Route,
    /// Milliseconds per stage, as a `server-timing` header.
    pub server_timing: String,
    /// The answer.
    pub body: ReplyBody,
}

/// The answer.
pub enum ReplyBody {
    /// One JSON object.
    Whole(Bytes),
    /// Events; an error is the last.
    Events(Events),
}

/// How a request was routed: what is known when the answer begins.
#[derive(Clone, Debug, Default)]
pub struct Route(pub DecisionHandle);

impl Route {
    /// The `x-splitrail-route` header.
    pub fn header(&self) -> String {
        let decision = self.0.read();
        let mut parts = vec![format!("flow={}", decision.flow)];
        if let Some(prefill) = &decision.prefill_worker {
            parts.push(format!("prefill={prefill}"));
        }
        if let Some(decode) = &decision.decode_worker {
            parts.push(format!("decode={decode}"));
        }
        if let Some(reason) = decision.local_reason {
            parts.push(format!("local={reason}"));
        }
        if decision.prompt_tokens.is_some() {
            parts.push(format!("overlap_blocks={}", decision.overlap_blocks));
        }
        if let (Some(cached), Some(source)) = (decision.cached_tokens, decision.cached_source) {
            parts.push(format!("cached_tokens={cached}; cached_source={source}"));
        }
        parts.join("; ")
    }
}

/// Serves one request. Dropping the future, or the reply, cancels what is left of
/// it and frees everything.
///
/// # Errors
/// What the client must be told instead of an answer.
pub async fn serve(core: &Arc<Core>, call: Call) -> Result<Reply, Error> {
    let mut scope = Scope::open(core, &call)?;
    let result = answer(core, call, &mut scope).await;
    match result {
        Ok((route, body)) => {
            let server_timing = scope.server_timing();
            let body = match body {
                ReplyBody::Whole(reply) => {
                    scope.end("ok");
                    ReplyBody::Whole(reply)
                }
                ReplyBody::Events(events) => ReplyBody::Events(scope.guard(events)),
            };
            Ok(Reply { route, server_timing, body })
        }
        Err(error) => {
            scope.end(error.outcome());
            Err(error)
        }
    }
}

async fn answer(
    core: &Arc<Core>,
    call: Call,
    scope: &mut Scope,
) -> Result<(Route, ReplyBody), Error> {
    let tokenizing = Instant::now();
    let prepared = prepare(core, call.endpoint, call.body).await?;
    let Prepared { served, endpoint, stream, include_usage, n, samples, bypasses_cache, units } =
        prepared;
    let stages = Stages::default();
    stages.record(&core.metrics, served.name(), "tokenize", tokenizing);
    let context = Context {
        core: Arc::clone(core),
        served,
        endpoint,
        stream,
        include_usage,
        samples,
        bypasses_cache: bypasses_cache.is_some(),
        traceparent: call.traceparent,
        stages,
    };
    scope.place(&context, &call.request_id);
    let decisions: Vec<DecisionHandle> =
        units.iter().map(|unit| start_decision(&context, unit, &call.request_id)).collect();
    let legs = units.iter().zip(&decisions).map(|(unit, record)| begin(&context, unit, record));
    let begun = try_join_all(legs).await;
    scope.flow = decisions.first().map_or(scope.flow, |decision| decision.read().flow);
    let mut begun = begun.inspect_err(|error| {
        for decision in &decisions {
            decision.update(|decision| {
                decision.outcome.get_or_insert(error.outcome());
            });
        }
    })?;
    scope.begun(&context);
    let body = match (begun.len(), begun.pop()) {
        (1, Some(Begun::Whole(reply))) => ReplyBody::Whole(reply.to_bytes()),
        (1, Some(Begun::Stream(unit))) => ReplyBody::Events(merge::single(unit)),
        (_, last) => merged(begun.into_iter().chain(last), n)?,
    };
    Ok((Route(decisions.into_iter().next().unwrap_or_default()), body))
}

fn merged(begun: impl Iterator<Item = Begun>, n: u32) -> Result<ReplyBody, Error> {
    let mut replies = Vec::new();
    let mut streams = Vec::new();
    for answer in begun {
        match answer {
            Begun::Whole(reply) => replies.push(reply),
            Begun::Stream(unit) => streams.push(merge::single(unit)),
        }
    }
    if streams.is_empty() {
        Ok(ReplyBody::Whole(merge::replies(replies, n)?.to_bytes()))
    } else {
        Ok(ReplyBody::Events(merge::streams(streams, n)))
    }
}

fn start_decision(context: &Context, unit: &Unit, request_id: &str) -> DecisionHandle {
    context.core.decisions.start(Decision {
        request_id: request_id.to_owned(),
        prompt_index: unit.prompt_index,
        model: context.served.name().to_owned(),
        flow: flow_name(context),
        decided_unix_ms: unix_ms(),
        prompt_tokens: unit.prompt_tokens,
        prompt_unknown: unit.unknown.map(str::to_owned),
        prompt_blocks: unit.hashes.len() as u32,
        ..Decision::default()
    })
}

/// What a request holds from its arrival to its end, on whatever path: room in the
/// router, its entry among the live ones, and its place in the metrics.
struct Scope {
    core: Arc<Core>,
    endpoint: &'static str,
    arrived: Instant,
    number: Option<u64>,
    served: Option<Arc<Served>>,
    flow: &'static str,
    in_flight: Option<IntGauge>,
    timing: String,
    ended: bool,
    _permit: OwnedSemaphorePermit,
}

static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl Scope {
    fn open(core: &Arc<Core>, call: &Call) -> Result<Self, Error> {
        let permit = Arc::clone(&core.in_flight).try_acquire_owned().map_err(|_| core.shed())?;
        Ok(Self {
            core: Arc::clone(core),
            endpoint: call.endpoint.name(),
            arrived: call.arrived,
            number: None,
            served: None,
            flow: "none",
            in_flight: None,
            timing: String::new(),
            ended: false,
            _permit: permit,
        })
    }

    /// The model is known.
    fn place(&mut self, context: &Context, request_id: &str) {
        let model = context.served.name();
        let gauge = self.core.metrics.requests_in_flight.with_label_values(&[model]);
        gauge.inc();
        self.in_flight = Some(gauge);
        let number = NUMBERS.fetch_add(1, Relaxed);
        let live = LiveRequest {
            request_id: request_id.to_owned(),
            model: model.to_owned(),
            endpoint: self.endpoint,
            arrived_unix_ms: unix_ms(),
        };
        self.core.live.insert(number, live);
        self.number = Some(number);
        self.served = Some(Arc::clone(&context.served));
        self.flow = flow_name(context);
    }

    /// The answer has begun.
    fn begun(&mut self, context: &Context) {
        let ttft = self.arrived.elapsed().as_secs_f64();
        let labels = [context.served.name(), self.flow];
        self.core.metrics.ttft.with_label_values(&labels).observe(ttft);
        self.timing = context.stages.server_timing();
    }

    fn server_timing(&self) -> String {
        self.timing.clone()
    }

    /// Ties the scope to a stream: it ends when the stream does.
    fn guard(self, events: Events) -> Events {
        let state = (Some(self), events);
        Box::pin(futures_util::stream::unfold(state, |(scope, mut events)| async move {
            let mut scope = scope?;
            match events.next().await {
                Some(Ok(data)) => Some((Ok(data), (Some(scope), events))),
                Some(Err(error)) => {
                    scope.end(error.outcome());
                    Some((Err(error), (None, events)))
                }
                None => {
                    scope.end("ok");
                    None
                }
            }
        }))
    }

    fn end(&mut self, outcome: &'static str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let model = self.served.as_ref().map_or("none", |served| served.name());
        let metrics = &self.core.metrics;
        let labels = [model, self.endpoint, self.flow, outcome];
        metrics.requests.with_label_values(&labels).inc();
        let seconds = self.arrived.elapsed().as_secs_f64();
        metrics.request.with_label_values(&[model, self.flow]).observe(seconds);
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        self.end("cancelled");
        if let Some(gauge) = &self.in_flight {
            gauge.dec();
        }
        if let Some(number) = self.number {
            self.core.live.remove(&number);
        }
    }
}
