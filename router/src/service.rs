//! Serves a request from its body to its reply, for HTTP and gRPC.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{TryFutureExt, try_join_all};

use crate::core::Core;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{Charge, MemoryBudget};
use splitrail_api::request::Options;
use splitrail_api::steering::Steering;
use splitrail_api::text::push_number;
use splitrail_api::unread::{UnreadReply, UnreadRoom};
use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::RequestFlow;
use splitrail_flow::context::{Context, ReplyRoom};
use splitrail_flow::prepare::{Payload, PreparedRequest, Unit, prepare};
use splitrail_flow::reply::detail::Detail;
use splitrail_flow::reply::keep_alive::{KeepAlive, LegActivity};
use splitrail_flow::reply::relay::detailed;
use splitrail_flow::run::boxed::boxed_future;
use splitrail_flow::run::generate::StartedReply;
use splitrail_flow::run::run_prompt;
use splitrail_ledger::decisions::{Decision, DecisionHandle};
use splitrail_ledger::entry::Entry;
use splitrail_ledger::timeline::Stage;
use splitrail_reply::merge::{self, Batch, Events, Places};
use splitrail_request_log::identity::{ClientTrace, Protocol};
use splitrail_telemetry::clock::unix_ms;

mod cost;
pub mod explain;
mod scope;

pub use scope::{Scope, count_unplaced, log_failure};

/// A request as a listener received it.
pub struct Call {
    /// The endpoint of the request.
    pub endpoint: Endpoint,
    /// Its body.
    pub body: Payload,
    /// How the client steers the placement.
    pub steering: Steering,
    /// Whether the client requested `usage.splitrail`.
    pub usage_detail: bool,
    /// The limit on replies that wait for the client, if other replies of the connection may wait.
    pub room: Option<Arc<UnreadRoom>>,
}

/// The reply for the client.
pub struct Reply {
    /// How it was routed.
    pub route: Route,
    /// Milliseconds per stage, as a `server-timing` header; `None` if the client may not see how the
    /// request was routed.
    pub server_timing: Option<String>,
    /// The fields that were not sent to engines, for the `x-splitrail-removed-fields` header.
    pub removed_fields: Option<String>,
    /// The body of the reply.
    pub body: ReplyBody,
}

impl Reply {
    /// Whether the client may see how the request was routed.
    pub fn shows_route(&self) -> bool {
        self.server_timing.is_some()
    }
}

/// The body of a reply.
pub enum ReplyBody {
    /// One JSON object.
    Whole(Bytes),
    /// A plain text.
    Text(Bytes),
    /// A stream of events; an error is the last one.
    Events(Events),
}

/// The placement of a request, as far as it is known when the reply begins. One decision per
/// prompt.
#[derive(Clone, Debug)]
pub struct Route(pub Vec<DecisionHandle>);

impl Route {
    /// The `x-splitrail-route` header: the first prompt's placement, and the totals of all prompts.
    pub fn header(&self) -> String {
        let Some(first) = self.0.first() else { return String::new() };
        let mut out = String::with_capacity(160);
        first.with(|decision| put_route(&mut out, decision));
        let (mut all_known, mut overlap_blocks) = (true, 0);
        let (mut cached, mut source) = (Some(0), "engine");
        for decision in &self.0 {
            decision.with(|decision| {
                // A sample that was sent apart is of the same prompt, which counts once.
                if decision.ledger.further_sample {
                    return;
                }
                let is_placed = !decision.candidates.is_empty();
                all_known &= is_placed && decision.prompt_tokens.is_some();
                overlap_blocks += decision.overlap_blocks;
                let told = decision.told_cached_tokens;
                cached = cached.zip(told).map(|(sum, tokens)| sum + u64::from(tokens));
                if decision.cached_source == Some("estimate") {
                    source = "estimate";
                }
            });
        }
        if all_known {
            out.push_str("; overlap_blocks=");
            push_number(&mut out, u64::from(overlap_blocks));
        }
        if let Some(tokens) = cached {
            out.push_str("; cached_tokens=");
            push_number(&mut out, tokens);
            out.extend(["; cached_source=", source]);
        }
        out
    }
}

/// Appends the placement of one prompt.
fn put_route(out: &mut String, decision: &Decision) {
    let mut put = |name: &str, value: &str| {
        let separator = if out.is_empty() { "" } else { "; " };
        out.extend([separator, name, "=", value]);
    };
    put("flow", decision.flow);
    let told = [
        ("prefill", decision.prefill_worker.as_deref()),
        ("decode", decision.decode_worker.as_deref()),
        ("local", decision.local_reason),
    ];
    for (name, value) in told {
        if let Some(value) = value {
            put(name, value);
        }
    }
    if let (Some(gate), Some(outcome)) = (decision.gate, decision.decode_try) {
        put("gate", gate);
        put("try", outcome);
    }
}

/// Serves one request. Dropping the future or the reply cancels the rest of the request and frees
/// everything.
///
/// # Errors
/// The error for the client in place of a reply.
pub async fn serve(core: &Arc<Core>, call: Call, mut scope: Box<Scope>) -> Result<Reply, Error> {
    let answered = {
        let ids = scope.ids.clone();
        let answering = pin!(answer(core, call, &mut scope));
        let answering = pin!(ids.around(answering));
        tokio::select! {
            biased;
            answered = answering => answered,
            () = core.abort.token().cancelled() => {
                Err(Error::new(ErrorKind::RouterStopping, "the router is stopping"))
            }
        }
    };
    match answered {
        Ok((reply, keep_alive)) => {
            let body = match reply.body {
                ReplyBody::Events(events) => ReplyBody::Events(scope.guard(events, keep_alive)),
                body => {
                    scope.end_whole();
                    body
                }
            };
            Ok(Reply { body, ..reply })
        }
        Err(error) => {
            scope.fail(&error);
            Err(scope.for_client(error))
        }
    }
}

/// Serves a request until its reply begins, or the head of its reply must go out before that.
async fn answer(
    core: &Arc<Core>,
    call: Call,
    scope: &mut Scope,
) -> Result<(Reply, Option<KeepAlive>), Error> {
    scope.admit()?;
    let timeline = Arc::clone(&scope.timeline);
    timeline.end_stage(Stage::Receive, Instant::now());
    let tenant = scope.tenant().cloned();
    // To prepare a request costs more than to refuse it.
    tenant.as_ref().map_or(Ok(()), |tenant| tenant.check_request_limit())?;
    let prepared =
        prepare(&core.preparer, call.endpoint, call.body, tenant.as_ref(), scope.memory()).await?;
    prepared.count(&core.metrics);
    let PreparedRequest { served, endpoint, options, units, .. } = prepared;
    scope.admit_units(units.len())?;
    let flow = call.steering.flow_for(&served.config)?;
    let flow = if endpoint.generates() { flow } else { RequestFlow::Aggregated };
    scope.reserve(&served, &units, &options, endpoint.generates() || endpoint.transcribes())?;
    let seconds = timeline.end_stage(Stage::Tokenize, Instant::now()).as_secs_f64();
    served.series.router_stage(&core.metrics, served.name(), Stage::Tokenize.name(), seconds);
    let ClientTrace { traceparent, tracestate } = scope.trace_context();
    let (arrived, share) = (scope.identity.arrived, scope.queue_share());
    let priority_max = tenant.as_ref().and_then(|tenant| tenant.priority_max);
    let urgency = call.steering.urgency(&served.config, arrived, share, priority_max);
    let unread = reply_room(core, scope, call.room, units.len());
    let is_grpc = scope.identity.protocol == Protocol::Grpc;
    let keep_alive = keep_alive(core, &options, is_grpc);
    let context = Arc::new(Context {
        metrics: Arc::clone(&core.metrics),
        preparer: Arc::clone(&core.preparer),
        hash_seed: core.cluster.hash_seed,
        served,
        memory: scope.hold_prepared(prepared.memory),
        endpoint,
        options,
        flow,
        // The body takes precedence over the header.
        threshold: prepared.threshold.or(call.steering.threshold),
        request_id: scope.identity.request_id.clone(),
        traceparent,
        tracestate,
        via: scope.identity.via.clone(),
        tenant,
        urgency,
        timeline,
        converts_events: is_grpc,
        unread,
        distrusts_kept_connections: AtomicBool::new(false),
        was_late: AtomicBool::new(false),
        activity: keep_alive.map(|_| Arc::<LegActivity>::default()),
    });
    let now_unix_ms = unix_ms();
    let decisions: Vec<DecisionHandle> =
        units.iter().map(|unit| start_decision(core, &context, unit, now_unix_ms)).collect();
    scope.place(&context, now_unix_ms, &units, decisions.clone());
    let debugs = context.tenant.as_ref().is_none_or(|tenant| tenant.debug);
    let detail = (call.usage_detail && debugs).then(|| Detail {
        decisions: decisions.clone().into(),
        fallback: context.served.config.cached_tokens_fallback,
        dialect: endpoint.dialect(),
    });
    let request = PlannedRequest {
        core: Arc::clone(core),
        memory: Arc::clone(scope.memory()),
        context: Arc::clone(&context),
        units,
        decisions: decisions.clone(),
        places: Places { n: options.n, samples_apart: prepared.samples_apart },
        detail,
    };
    let (body, keep_alive) = request.reply(keep_alive, scope).await?;
    let server_timing = debugs.then(|| context.timeline.server_timing());
    let removed_fields = prepared.removed.header();
    Ok((Reply { route: Route(decisions), server_timing, removed_fields, body }, keep_alive))
}

/// After which silence a comment goes out to the client, if ever. gRPC keeps its connections open
/// itself.
fn keep_alive(core: &Core, options: &Options, is_grpc: bool) -> Option<Duration> {
    core.serving().config.streams.keep_alive.filter(|_| options.stream && !is_grpc)
}

/// The events of a streamed reply that has not begun.
fn events_of(
    beginning: Pin<Box<impl Future<Output = Result<ReplyBody, Error>> + Send + 'static>>,
) -> Events {
    let begun = beginning.and_then(async |body| match body {
        ReplyBody::Events(events) => Ok(events),
        ReplyBody::Whole(_) | ReplyBody::Text(_) => {
            Err(Error::new(ErrorKind::Internal, "the reply is no stream"))
        }
    });
    Box::pin(begun.try_flatten_stream())
}

/// A request whose legs can be run.
struct PlannedRequest {
    core: Arc<Core>,
    memory: Arc<MemoryBudget>,
    context: Arc<Context>,
    units: Vec<Unit>,
    decisions: Vec<DecisionHandle>,
    places: Places,
    detail: Option<Detail>,
}

impl PlannedRequest {
    /// Runs the legs until the reply begins, or the head of the reply must go out before that.
    async fn reply(
        self,
        keep_alive: Option<Duration>,
        scope: &mut Scope,
    ) -> Result<(ReplyBody, Option<KeepAlive>), Error> {
        let context = Arc::clone(&self.context);
        let mut keep_alive =
            keep_alive.zip(context.activity.as_ref()).map(|(interval, activity)| {
                let timers = &context.served.client.timers;
                KeepAlive::new(activity, interval, context.endpoint.dialect(), timers)
            });
        let mut beginning = boxed_future(|| self.begin());
        let begun = match &mut keep_alive {
            None => Some(beginning.as_mut().await?),
            Some(keep_alive) => keep_alive.bound(beginning.as_mut()).await.transpose()?,
        };
        let Some(body) = begun else {
            return Ok((ReplyBody::Events(events_of(beginning)), keep_alive));
        };
        if context.endpoint.generates() {
            scope.begun();
        }
        let body = match body {
            ReplyBody::Whole(reply) => {
                ReplyBody::Whole(Arc::clone(&context.unread.unread).bind(reply))
            }
            ReplyBody::Text(reply) => {
                ReplyBody::Text(Arc::clone(&context.unread.unread).bind(reply))
            }
            events => events,
        };
        Ok((body, keep_alive))
    }

    async fn begin(self) -> Result<ReplyBody, Error> {
        let begun = begin_all(&self.context, &self.units, &self.decisions).await?;
        combine(&self.core, &self.memory, begun, self.places, self.detail).await
    }
}

/// What the reply to this number of prompts is charged to.
fn reply_room(
    core: &Core,
    scope: &Scope,
    room: Option<Arc<UnreadRoom>>,
    prompts: usize,
) -> ReplyRoom {
    let unread = Arc::new(UnreadReply::new(&core.metrics.shed, room, prompts > 1));
    ReplyRoom { unread, memory: Arc::clone(scope.memory()) }
}

/// Begins the replies of all prompts, each with its own decision.
async fn begin_all(
    context: &Arc<Context>,
    units: &[Unit],
    decisions: &[DecisionHandle],
) -> Result<Vec<StartedReply>, Error> {
    if let ([unit], [decision]) = (units, decisions) {
        return Ok(vec![run_prompt(context, unit, decision, 0).await?]);
    }
    let pairs = units.iter().zip(decisions).enumerate();
    let begin = |(place, (unit, decision))| run_prompt(context, unit, decision, place);
    Box::pin(try_join_all(pairs.map(begin))).await
}

/// Combines the replies of all prompts into one, off the reactor if they are long.
async fn combine(
    core: &Arc<Core>,
    memory: &Arc<MemoryBudget>,
    begun: Vec<StartedReply>,
    places: Places,
    detail: Option<Detail>,
) -> Result<ReplyBody, Error> {
    let (bytes, combining) = (begun.iter().map(bytes).sum(), Arc::clone(core));
    let memory = Arc::clone(memory);
    let work = move || one_reply(&combining, &memory, begun, places, detail);
    core.preparer.cores.run_sized(bytes, work).await?
}

/// The bytes of a reply that is whole already.
fn bytes(begun: &StartedReply) -> usize {
    match begun {
        StartedReply::Whole(reply) => reply.bytes(),
        StartedReply::Verbatim(reply) | StartedReply::Text(reply) => reply.len(),
        StartedReply::Stream(_) | StartedReply::RouterEvents(_) => 0,
    }
}

/// Combines the replies of all prompts into one.
fn one_reply(
    core: &Core,
    memory: &Arc<MemoryBudget>,
    mut begun: Vec<StartedReply>,
    places: Places,
    detail: Option<Detail>,
) -> Result<ReplyBody, Error> {
    let merged = match (begun.len(), begun.pop()) {
        (1, Some(begun)) => match begun {
            StartedReply::Whole(reply) => MergedReply::Whole(reply),
            // A list has no member for details.
            StartedReply::Verbatim(reply) if detail.is_none() || reply.starts_with(b"[") => {
                return Ok(ReplyBody::Whole(charged(core, memory, reply)?));
            }
            StartedReply::Text(reply) => {
                return Ok(ReplyBody::Text(charged(core, memory, reply)?));
            }
            StartedReply::Verbatim(reply) => MergedReply::Whole(parsed(reply)?),
            StartedReply::Stream(unit) => MergedReply::Events(unit.into_events(None)),
            StartedReply::RouterEvents(events) => MergedReply::Events(merge::made(events)),
        },
        (_, last) => merged(begun.into_iter().chain(last).collect(), places)?,
    };
    Ok(match (merged, detail) {
        (MergedReply::Whole(reply), None) => ReplyBody::Whole(written(core, memory, &reply)?),
        (MergedReply::Events(events), None) => ReplyBody::Events(events),
        (MergedReply::Whole(mut reply), Some(detail)) => {
            detail.add(&mut reply);
            ReplyBody::Whole(written(core, memory, &reply)?)
        }
        (MergedReply::Events(events), Some(detail)) => {
            ReplyBody::Events(detailed(events, detail, &core.preparer))
        }
    })
}

/// Size in bytes up to which a reply is not charged.
const SHORT_BYTES: usize = 4 << 10;
/// Size in bytes from which a reply was gathered from several pieces, and charged meanwhile.
const LONG_BYTES: usize = 64 << 10;

/// The bytes of a reply; the memory of all but short ones is charged until it is sent.
fn written(core: &Core, memory: &Arc<MemoryBudget>, reply: &JsonObject) -> Result<Bytes, Error> {
    let bytes = reply.bytes();
    if bytes < LONG_BYTES {
        return charged(core, memory, reply.to_bytes());
    }
    let charge = charge(core, memory, bytes)?;
    // What was gathered from several pieces is charged already. A copy ends that charge.
    Ok(charge.hold(Vec::from(reply.to_bytes())))
}

/// A reply as its engine sent it. A long one is charged already.
fn charged(core: &Core, memory: &Arc<MemoryBudget>, reply: Bytes) -> Result<Bytes, Error> {
    match reply.len() {
        SHORT_BYTES..LONG_BYTES => Ok(charge(core, memory, reply.len())?.hold(reply)),
        _ => Ok(reply),
    }
}

fn charge(core: &Core, memory: &Arc<MemoryBudget>, bytes: usize) -> Result<Charge, Error> {
    let mut charge = memory.charge();
    match charge.grow(bytes, core.serving().limits.request_memory_max_bytes) {
        true => Ok(charge),
        false => Err(core.shed_memory()),
    }
}

enum MergedReply {
    Whole(JsonObject),
    Events(Events),
}

/// An engine's reply as an object.
fn parsed(reply: Bytes) -> Result<JsonObject, Error> {
    JsonObject::parse(reply).map_err(|error| {
        let message = format!("an engine's reply cannot be read: {}", error.message());
        Error::new(ErrorKind::EngineFailed, message)
    })
}

fn merged(begun: Vec<StartedReply>, places: Places) -> Result<MergedReply, Error> {
    let batch = Batch::new(begun.len(), places);
    let mut replies = Vec::new();
    let mut streams = Vec::new();
    for (prompt_index, answer) in begun.into_iter().enumerate() {
        let place = || batch.place(prompt_index);
        match answer {
            StartedReply::Whole(reply) => replies.push(reply),
            StartedReply::Verbatim(reply) | StartedReply::Text(reply) => {
                replies.push(parsed(reply)?);
            }
            StartedReply::Stream(unit) => streams.push(unit.into_events(Some(place()))),
            StartedReply::RouterEvents(events) => streams.push(place().made(events)),
        }
    }
    if streams.is_empty() {
        Ok(MergedReply::Whole(merge::replies(replies, places)?))
    } else {
        Ok(MergedReply::Events(merge::streams(batch, streams)))
    }
}

fn start_decision(
    core: &Core,
    context: &Context,
    unit: &Unit,
    decided_unix_ms: u64,
) -> DecisionHandle {
    let ledger = match (unit.further_sample, context.endpoint.generates()) {
        (true, _) => Entry::further_sample(),
        (false, true) => Entry::default(),
        (false, false) => Entry::without_cached_tokens(),
    };
    core.decisions.start(Decision {
        ledger,
        request_id: context.request_id.clone(),
        prompt_index: unit.prompt_index,
        tenant: context.tenant.as_ref().map(|tenant| tenant.name.clone()),
        model: context.served.name().into(),
        flow: context.flow.name(),
        decided_unix_ms,
        prompt_tokens: unit.prompt_tokens,
        prompt_unknown: unit.unknown,
        prompt_blocks: unit.hashes.len() as u32,
        ..Decision::default()
    })
}
