//! Everything that a request holds from its arrival to its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{self, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures_util::Stream;
use http::HeaderValue;
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::cost::{self, MostTokens};
use crate::admission::Share;
use crate::core::{Core, LiveRequest};
use crate::ingress::identify::Sender;
use splitrail_access::limits::Reservation;
use splitrail_access::{Tenant, TenantPlaces};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{Charge, MemoryBudget};
use splitrail_api::request::Options;
use splitrail_api::shares::ClientShare;
use splitrail_fleet::ServedModel;
use splitrail_fleet::losses::FollowedPrompt;
use splitrail_flow::context::Context;
use splitrail_flow::prepare::Unit;
use splitrail_flow::reply::keep_alive::KeepAlive;
use splitrail_ledger::close::{UsedTokens, close};
use splitrail_ledger::decisions::DecisionHandle;
use splitrail_ledger::record::{LabelledTenant, RequestFacts};
use splitrail_ledger::recorder::Prompt;
use splitrail_ledger::timeline::{RequestTimes, Timeline};
use splitrail_reply::merge::Events;
use splitrail_request_log::identity::{ClientTrace, Identity};
use splitrail_settings::logging::RequestIds;
use splitrail_telemetry::clock::unix_ms;
use splitrail_telemetry::{EndedRequest, Metrics, TraceId};

mod log;

use log::RequestEnd;
pub use log::log_failure;

/// The request's places, its entry among the live requests, its metrics and its records: dropping
/// the scope frees and closes them on every path.
pub struct Scope {
    core: Arc<Core>,
    endpoint: &'static str,
    /// The request as it arrived.
    pub(super) identity: Identity,
    /// The ids that log lines about the request carry.
    pub ids: RequestIds,
    /// The times of the request.
    pub(super) timeline: Arc<Timeline>,
    /// How the client wants the request answered, once the body is read.
    options: Option<Options>,
    /// The places: one once the body is complete, and further ones once the number of units is
    /// known.
    permits: [Option<Share>; 2],
    /// The sender, to whom the places are charged.
    sender: Sender,
    /// The places among those of the tenant, taken with `permits`.
    tenant_places: [Option<TenantPlaces>; 2],
    /// What the request counts towards the limits of its tenant.
    reservation: Option<Reservation>,
    /// The most tokens for which its tenant is charged.
    most_tokens: MostTokens,
    /// The charge for the body, which further attempts need until the end.
    body: Option<Charge>,
    /// The charge for the body and for what was prepared from it.
    prepared: Option<Arc<Charge>>,
    /// When the reply began.
    begun: Option<Instant>,
    /// The time from which on the client does not wait for the reply, if it has named one.
    deadline: Option<tokio::time::Instant>,
    /// Set once the model is known.
    placed: Option<PlacedRequest>,
    /// Whether the head of the reply says that the request is served: an error is told in the body.
    is_replied: bool,
    ended: bool,
}

struct PlacedRequest {
    served: Arc<ServedModel>,
    flow: &'static str,
    number: u64,
    decisions: Vec<DecisionHandle>,
    /// What is needed to record the prompts, if the request is recorded.
    recorded: Option<Vec<Prompt>>,
    /// Its prompts, if losses of cache hits are monitored.
    followed: Vec<FollowedPrompt>,
    /// Whether the reply is a stream.
    stream: bool,
    /// Whether the request has one prompt with one sample.
    one_sample: bool,
    /// The trace that the request belongs to.
    trace: Option<TraceId>,
}

impl PlacedRequest {
    /// The value of the label `stream`.
    fn stream_label(&self) -> &'static str {
        if self.stream { "true" } else { "false" }
    }

    /// Compares the predicted time to first token with the measured one.
    fn compare_prediction(&self, metrics: &Metrics, timeline: &Timeline) {
        let [decision] = &self.decisions[..] else { return };
        let predicted_ms = decision.with(|decision| {
            let one = decision.attempts == 1;
            decision.predicted_ttft_ms().filter(|_| one)
        });
        let Some(predicted_ms) = predicted_ms else { return };
        let observed_ms = timeline.legs().as_secs_f64() * 1e3;
        self.served.series.predicted(metrics, self.served.name(), predicted_ms, observed_ms);
    }
}

static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl Scope {
    /// Opens the scope of a request that has begun to arrive. It is in a box because it moves from
    /// future to future.
    pub fn open(
        core: &Arc<Core>,
        endpoint: Endpoint,
        identity: Identity,
        sender: Sender,
    ) -> Box<Self> {
        let trace = core.logs.traces.begin(&identity.trace);
        let ids = identity.log_ids(trace.as_ref());
        Box::new(Self {
            ids,
            timeline: Arc::new(Timeline::new(identity.arrived, trace)),
            identity,
            options: None,
            deadline: None,
            is_replied: false,
            sender,
            tenant_places: [None, None],
            reservation: None,
            most_tokens: MostTokens::default(),
            body: None,
            prepared: None,
            core: Arc::clone(core),
            endpoint: endpoint.name(),
            permits: [None, None],
            begun: None,
            placed: None,
            ended: false,
        })
    }

    /// Takes a place, when the body is complete.
    ///
    /// # Errors
    /// No place is free, or the tenant has reached its limit.
    pub(super) fn admit(&mut self) -> Result<(), Error> {
        self.take_places(0, 1, 1)
    }

    /// Takes places for a request that needs `whole` places altogether.
    fn take_places(&mut self, slot: usize, places: usize, whole: usize) -> Result<(), Error> {
        if let Some(tenant) = &self.sender.tenant {
            self.tenant_places[slot] = Some(TenantPlaces::take(tenant, places, whole)?);
        }
        self.permits[slot] = Some(self.core.admit(self.sender.share, places)?);
        Ok(())
    }

    /// The tenant of the request; `None` if the router has no tenants.
    pub(super) fn tenant(&self) -> Option<&Arc<Tenant>> {
        self.sender.tenant.as_ref()
    }

    /// Takes further places for a request of several units, each of which is served like a request
    /// of its own; the first unit has the request's place.
    ///
    /// # Errors
    /// No places are free, or the tenant has reached its limit; a 400 if there are never enough
    /// places.
    pub(super) fn admit_units(&mut self, units: usize) -> Result<(), Error> {
        let max = self.core.in_flight.places();
        if units > max {
            let message = format!(
                "the request has more than {max} prompts, or samples that are sent apart \
                 (limits.in_flight_max)"
            );
            return Err(Error::new(ErrorKind::InvalidRequest, message));
        }
        if units > 1 {
            self.take_places(1, units - 1, units)?;
        }
        Ok(())
    }

    /// Counts the most that the request may cost towards the limits of its tenant, if the tenant has
    /// any, until it is settled.
    ///
    /// # Errors
    /// A 429: a limit is used up, or the request is larger than a limit.
    pub(super) fn reserve(
        &mut self,
        served: &ServedModel,
        units: &[Unit],
        options: &Options,
        generates: bool,
    ) -> Result<(), Error> {
        let tenant = self.sender.tenant.as_ref().filter(|tenant| tenant.is_limited());
        let Some(tenant) = tenant else { return Ok(()) };
        let tokens = cost::expected(served, units, options, generates);
        self.reservation = Some(tenant.reserve(tokens)?);
        self.most_tokens = MostTokens::of(served, units, options, generates);
        tenant.series.reserved(&self.core.metrics, &tenant.label, tokens);
        Ok(())
    }

    /// Sets the time from which on the client does not wait for the reply.
    pub fn set_deadline(&mut self, deadline: Option<tokio::time::Instant>) {
        self.deadline = deadline;
    }

    /// Holds the charge for the request's body.
    pub fn hold(&mut self, body: Charge) {
        self.body = Some(body);
    }

    /// Holds the charge for what was prepared from the body. Returns it with that for the body.
    pub(super) fn hold_prepared(&mut self, mut prepared: Charge) -> Arc<Charge> {
        self.body.take().into_iter().for_each(|body| prepared.join(body));
        Arc::clone(self.prepared.insert(Arc::new(prepared)))
    }

    /// Begins a record of each prompt, when the model is known.
    pub(super) fn place(
        &mut self,
        context: &Arc<Context>,
        now_unix_ms: u64,
        units: &[Unit],
        decisions: Vec<DecisionHandle>,
    ) {
        let losses = &context.served.pool.losses;
        // A prompt of unknown tokens has no blocks, and further samples share the prompt.
        let counts = |unit: &Unit| unit.unknown.is_none() && !unit.further_sample;
        let watched = units.iter().all(counts);
        let mut followed = losses.record_arrival(units.iter().map(|unit| &unit.hashes[..]));
        followed.retain(|_| watched);
        // A request that generates nothing cannot be replayed.
        let takes = context.endpoint.generates() && self.core.logs.recorder.takes_one();
        let recorded = takes.then(|| {
            let block_size = context.served.pool.block_size();
            let prompt = |unit: &Unit| Prompt::new(&unit.hashes, block_size, unit.weight_tokens);
            units.iter().map(prompt).collect()
        });
        let model = context.served.name();
        context.served.series.in_flight(&self.core.metrics, model, 1);
        let number = NUMBERS.fetch_add(1, Relaxed);
        let live = LiveRequest {
            request_id: context.request_id.clone(),
            model: model.into(),
            endpoint: self.endpoint,
            arrived_unix_ms: now_unix_ms,
        };
        self.core.live.insert(number, live);
        self.options = Some(context.options);
        self.placed = Some(PlacedRequest {
            served: Arc::clone(&context.served),
            flow: context.flow.name(),
            number,
            decisions,
            recorded,
            followed,
            stream: context.options.stream,
            one_sample: units.len() == 1 && context.options.samples == 1,
            trace: self.trace_id(),
        });
    }

    /// The trace that the request belongs to: its own, or that of its client.
    fn trace_id(&self) -> Option<TraceId> {
        let own = self.timeline.trace.as_ref().map(|trace| trace.context);
        own.or_else(|| self.identity.trace.context()).map(TraceId::from)
    }

    /// The trace context for engines, as `traceparent` and `tracestate`: that of the request's span
    /// if the request is traced. Otherwise the client's `traceparent` is passed on alone.
    pub(super) fn trace_context(&self) -> ClientTrace {
        let ClientTrace { traceparent, tracestate } = &self.identity.trace;
        match &self.timeline.trace {
            Some(trace) => {
                let own = HeaderValue::try_from(trace.context.to_header()).ok();
                let tracestate = tracestate.clone().filter(|_| trace.parent_id.is_some());
                ClientTrace { traceparent: own, tracestate }
            }
            None => ClientTrace { traceparent: traceparent.clone(), tracestate: None },
        }
    }

    /// Whose share of the queue the request counts towards.
    pub(super) fn queue_share(&self) -> (ClientShare, u64) {
        self.sender.queue_share(&self.core.admission, self.identity.session.as_deref())
    }

    /// Notes that the reply has begun. The first token of a whole reply is not seen.
    pub(super) fn begun(&mut self) {
        let now = self.timeline.reply_begun(Instant::now());
        self.begun = Some(now);
        if let Some(placed) = &self.placed {
            let losses = &placed.served.pool.losses;
            placed.followed.iter().for_each(|followed| losses.computed(followed));
            if !placed.stream {
                return;
            }
            let ttft = now.duration_since(self.identity.arrived).as_secs_f64();
            let (model, flow) = self.labels();
            let metrics = &self.core.metrics;
            placed.served.series.begun(metrics, model, flow, ttft, placed.trace);
            placed.compare_prediction(metrics, &self.timeline);
        }
    }

    /// Ties the scope to a stream, so that it ends with the stream. The stream may begin before its
    /// reply: with comments.
    pub(super) fn guard(
        mut self: Box<Self>,
        events: Events,
        keep_alive: Option<KeepAlive>,
    ) -> Events {
        self.is_replied = true;
        // Requested once, because each request takes a shared lock.
        let cut = Box::pin(self.core.abort.token().clone().cancelled_owned());
        let ids = Some(self.ids.clone());
        Box::pin(ScopedEvents { scope: Some(self), events, ids, cut, keep_alive })
    }

    /// The budget for the memory of the sender's requests.
    pub(super) fn memory(&self) -> &Arc<MemoryBudget> {
        &self.sender.memory
    }

    /// Notes that the request has ended at the beginning of its reply, which was complete.
    pub(super) fn end_whole(&mut self) {
        let now = self.begun.unwrap_or_else(Instant::now);
        self.end_at(now, RequestEnd::ok(self.identity.protocol));
    }

    /// Notes that the request has ended well; further calls have no effect.
    fn end(&mut self) {
        if !self.ended {
            self.end_at(Instant::now(), RequestEnd::ok(self.identity.protocol));
        }
    }

    /// Notes that the request has ended with an error; further calls have no effect.
    pub fn fail(&mut self, error: &Error) {
        if self.ended {
            return;
        }
        if let (Some(tenant), Some(limit)) = (&self.sender.tenant, error.limit_reached()) {
            tenant.series.refused(&self.core.metrics, &tenant.label, limit);
        }
        let model = self.placed.as_ref().map(|placed| placed.served.name());
        log_failure(&self.ids, model, error);
        let ending = RequestEnd::failed(self.identity.protocol, error, self.is_replied);
        self.end_at(Instant::now(), ending);
    }

    /// The error as the client is told it: only tenants with `debug` learn which worker failed.
    pub fn for_client(&self, error: Error) -> Error {
        let error = error.with_request_id(&self.identity.request_id);
        match &self.sender.tenant {
            Some(tenant) if !tenant.debug => error.withheld(),
            _ => error,
        }
    }

    /// Notes that the client has left; has no effect after the end.
    fn cancel(&mut self) {
        if !self.ended {
            let is_late =
                self.deadline.is_some_and(|deadline| deadline <= tokio::time::Instant::now());
            let ending = RequestEnd::cancelled(self.identity.protocol, self.is_replied, is_late);
            self.end_at(Instant::now(), ending);
        }
    }

    fn end_at(&mut self, now: Instant, ending: RequestEnd) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.timeline.end_within(now);
        let used = self.settle(now, ending.outcome, ending.result);
        self.write_logs(now, ending, used);
    }

    /// Closes the records of the request, counts it, and settles what it has used.
    fn settle(&mut self, now: Instant, outcome: &'static str, result: &'static str) -> UsedTokens {
        for decision in self.placed.iter().flat_map(|placed| &placed.decisions) {
            decision.request_ended(outcome);
        }
        let (model, flow) = self.labels();
        let metrics = &self.core.metrics;
        let seconds = now.duration_since(self.identity.arrived).as_secs_f64();
        let tenant = self.sender.tenant.as_ref();
        let tenant = tenant.map(|tenant| LabelledTenant {
            name: &tenant.name,
            label: &tenant.label,
            series: &tenant.series,
        });
        let Some(placed) = &self.placed else {
            if let Some(tenant) = tenant {
                tenant.series.ended(metrics, tenant.label, outcome);
            }
            count_unplaced(metrics, self.endpoint, outcome, result, seconds);
            return UsedTokens::default();
        };
        let (endpoint, stream, trace) = (self.endpoint, placed.stream_label(), placed.trace);
        let counted = EndedRequest { endpoint, flow, stream, outcome, result, seconds, trace };
        placed.served.series.ended(metrics, model, counted);
        let ended_unix_ms = unix_ms();
        let arrived_unix_ms = ended_unix_ms.saturating_sub((seconds * 1e3) as u64);
        let request_id = &self.identity.request_id;
        let ended = RequestFacts {
            request_id,
            tenant,
            session: self.identity.session.as_deref(),
            model,
            endpoint,
            flow,
            outcome,
            arrived_unix_ms,
            ended_unix_ms,
        };
        let (series, ledger) = (&placed.served.series, &self.core.logs.ledger);
        let used = close(metrics, series, ledger, &ended, &placed.decisions);
        if let Some(reservation) = self.reservation.take() {
            let reserved = reservation.tokens();
            let tokens = self.most_tokens.settled(&placed.served, request_id, reserved, used);
            if let Some(tenant) = tenant {
                tenant.series.settled(metrics, tenant.label, tokens);
            }
            reservation.settle(tokens);
        }
        self.complete_decisions(placed, arrived_unix_ms, seconds);
        let pool = &placed.served.pool;
        if outcome == "ok" {
            self.observe_pace(placed, now, used.completion_tokens);
            let (roster, block_size) = (pool.roster(), pool.block_size());
            for (followed, decision) in placed.followed.iter().zip(&placed.decisions) {
                decision.with(|decision| {
                    pool.losses.ended(followed, decision, &roster, block_size);
                });
            }
        }
        used
    }

    /// Records the time per output token of a stream with one sample, which is known only if the
    /// request has completed.
    fn observe_pace(&self, placed: &PlacedRequest, now: Instant, tokens: u64) {
        let Some(begun) = self.begun.filter(|_| placed.stream && placed.one_sample) else { return };
        if tokens >= 2 {
            let seconds = now.duration_since(begun).as_secs_f64() / (tokens - 1) as f64;
            let series = &placed.served.series;
            series.generated_at(&self.core.metrics, placed.served.name(), seconds);
        }
    }

    /// Completes the request's decisions with its times. Before, writes them to the record file, if
    /// the request is one of those that are recorded: the lines have the times themselves.
    fn complete_decisions(&self, placed: &PlacedRequest, arrived_unix_ms: u64, seconds: f64) {
        let begun = self.begun.filter(|_| placed.stream);
        let ttft = begun.map(|begun| begun.duration_since(self.identity.arrived));
        let times = RequestTimes {
            ttft_ms: ttft.map(|ttft| ttft.as_secs_f64() * 1e3),
            total_ms: seconds * 1e3,
            stages_ms: self.timeline.times(),
        };
        let recorder = &self.core.logs.recorder;
        for (prompt, decision) in placed.recorded.iter().flatten().zip(&placed.decisions) {
            decision.with(|decision| {
                recorder.write(self.endpoint, arrived_unix_ms, times, prompt, decision);
            });
        }
        let ended_unix_ms = arrived_unix_ms.saturating_add((seconds * 1e3) as u64);
        for decision in &placed.decisions {
            decision.request_took(times);
            self.core.decisions.keep_if_notable(decision, ended_unix_ms);
        }
    }

    /// Model and flow; the flow that was executed, if a decision has been made.
    fn labels(&self) -> (&str, &'static str) {
        let Some(placed) = &self.placed else { return ("none", "none") };
        let executed = placed.decisions.first().map(|first| first.with(|decision| decision.flow));
        (placed.served.name(), executed.unwrap_or(placed.flow))
    }
}

/// Counts a request that ended before its model was known, after this time.
pub fn count_unplaced(
    metrics: &Metrics,
    endpoint: &str,
    outcome: &'static str,
    result: &'static str,
    seconds: f64,
) {
    metrics.requests.with_label_values(&["none", endpoint, "none", outcome]).inc();
    metrics.request_results.with_label_values(&["none", result]).inc();
    metrics.request.with_label_values(&["none", "none", "none"]).observe(seconds);
}

/// A stream that holds its request's scope until it ends.
struct ScopedEvents {
    // Dropped before the scope: what the legs do at their end belongs to the request.
    events: Events,
    scope: Option<Box<Scope>>,
    ids: Option<RequestIds>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    keep_alive: Option<KeepAlive>,
}

impl Stream for ScopedEvents {
    type Item = Result<Bytes, Error>;

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(scope) = &mut this.scope else { return Poll::Ready(None) };
        let poll = |context: &mut task::Context<'_>| this.events.as_mut().poll_next(context);
        let next = match RequestIds::poll(&mut this.ids, poll, context) {
            Poll::Pending if this.cut.as_mut().poll(context).is_pending() => {
                let Some(keep_alive) = &mut this.keep_alive else { return Poll::Pending };
                return keep_alive.poll(context).map(|comment| Some(Ok(comment)));
            }
            Poll::Pending => {
                let message = "the reply broke off: the router is stopping";
                Some(Err(Error::new(ErrorKind::RouterStopping, message)))
            }
            Poll::Ready(next) => next,
        };
        let last = match next {
            Some(Ok(event)) => {
                if scope.begun.is_none() {
                    scope.begun();
                }
                this.keep_alive.iter_mut().for_each(KeepAlive::event_sent);
                return Poll::Ready(Some(Ok(event)));
            }
            Some(Err(error)) => {
                // What the legs do at their end belongs to the request.
                this.events = Box::pin(futures_util::stream::empty());
                scope.fail(&error);
                Some(Err(scope.for_client(error)))
            }
            None => {
                scope.end();
                None
            }
        };
        this.scope = None;
        Poll::Ready(last)
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        self.cancel();
        if let Some(placed) = &self.placed {
            placed.served.series.in_flight(&self.core.metrics, placed.served.name(), -1);
            self.core.live.remove(&placed.number);
        }
        for share in self.permits.iter_mut().filter_map(Option::take) {
            self.core.leave(share);
        }
    }
}
