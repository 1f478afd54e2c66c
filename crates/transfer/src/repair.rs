//! Frees what a decode engine holds for a pair of legs that was given up.
//!
//! With a connector whose legs wait for each other, a decode engine that has received its leg keeps the
//! blocks of the prompt until the prefill engine has sent their KV, although the leg itself was
//! cancelled. vLLM's `MooncakeConnector` keeps them for `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, by
//! default eight minutes, and `NixlPushConnector` for good. Only a prefill leg with the same name that
//! runs to its end frees them.
//!
//! A prefill leg that is cancelled is no help: its engine drops the name, and with it the decode engine
//! that waits. Therefore the prefill leg of a pair that is given up is not cancelled but runs on, and a
//! prefill leg that has failed is sent again. If the decode engine is gone, nothing waits there.
//!
//! Whether an engine is gone does not follow from the state of its worker: a worker may leave the
//! fleet, get a new description, or be out of reach for a moment while its engine runs on. A new process
//! is what the engine's own reports say.
//!
//! With `NixlPushConnector`, only the engine with which decode has registered can free the blocks. If it
//! is gone, the decode leg is stranded: its engine keeps the blocks until it is restarted.

use std::future::poll_fn;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::Charge;
use splitrail_api::{Endpoint, Parts};
use splitrail_engine::connectors::nixl_push::{PushEngine, PushReply};
use splitrail_engine_client::{LegHeaders, RevocableBody, SendState, Shape};
use splitrail_fleet::{Cluster, LegReply, LegRequest, ServedModel, Worker};
use splitrail_telemetry::Metrics;
use splitrail_workload::Booking;
use tokio::time::Instant;

use crate::lease::Lease;

/// How long a pair is repaired: as long as the engines wait for each other by default.
const REPAIR_MAX: Duration = Duration::from_secs(480);

/// The pause after the first attempt that failed; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// The longest pause after an attempt that failed.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How often it is checked whether the decode engine is still there.
const CHECK_EVERY: Duration = Duration::from_millis(250);

/// The outcome of a leg whose decode engine keeps the blocks until it is restarted.
const STRANDED: &str = "stranded";

/// The call of a prefill leg, which can outlive its request.
type Call = Pin<Box<dyn Future<Output = Result<LegReply, Error>> + Send>>;

/// A decode leg that its engine may have registered with the prefill engine.
#[derive(Clone, Debug)]
pub struct Registration {
    send_state: SendState,
    is_over: Arc<AtomicBool>,
}

impl Registration {
    /// For a leg that is about to be sent with the body of this state.
    pub fn new(send_state: SendState) -> Self {
        Self { send_state, is_over: Arc::default() }
    }

    /// Notes how the leg ended. An engine that has answered, if only with an error, does not wait.
    pub fn ended<T>(&self, begun: &Result<T, Error>) {
        if begun.as_ref().err().is_none_or(Error::is_reply) {
            self.received();
        }
    }

    /// Notes that the engine has the KV.
    pub fn received(&self) {
        self.is_over.store(true, Relaxed);
    }

    /// Whether the engine has the KV, or has answered and does not wait for it.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    /// Whether the engine may have the leg and wait for its KV. If not, it will not get the leg
    /// either.
    fn may_wait(&self) -> bool {
        !self.is_over() && !self.send_state.take_back()
    }
}

/// How far a prefill leg has come.
enum Progress {
    UnderWay(Call),
    /// The engine has replied: it has sent the KV, or never will.
    Replied,
    /// The engine has replied, and sends the KV if decode registers before this time.
    Pushes(Instant),
    /// Another engine than the one with which decode registers has replied.
    AnotherReplied,
    /// The leg was not sent, or has failed.
    Failed,
}

/// The prefill leg of a pair. When it is dropped, it frees what the decode engine holds for the pair,
/// if that may be anything.
pub struct Repair {
    cluster: Arc<Cluster>,
    leg: Arc<SentPrefill>,
    registration: Registration,
    leg_headers: LegHeaders,
    progress: Progress,
}

/// What is needed to send a prefill leg again.
pub struct PrefillLeg {
    /// The model.
    pub served: Arc<ServedModel>,
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// The endpoint of both legs.
    pub endpoint: Endpoint,
    /// The body.
    pub body: Parts,
    /// The charge for the memory of the body.
    pub memory: Arc<Charge>,
    /// The prefill worker.
    pub prefill: Arc<Worker>,
    /// The rank that the prefill leg is placed on.
    pub prefill_rank: Option<u16>,
    /// The decode worker.
    pub decode: Arc<Worker>,
    /// The rank that the decode leg is placed on.
    pub decode_rank: Option<u16>,
    /// The engine with which decode registers, if it pushes.
    pub pushes: Option<Arc<PushEngine>>,
    /// The tokens that the leg computes.
    pub uncached_tokens: u64,
    /// The tokens of the whole prompt.
    pub prompt_tokens: u64,
}

/// How often both engines had restarted when the pair began. Another process knows nothing of it.
#[derive(Clone, Copy)]
struct Restarts {
    prefill: u32,
    decode: u32,
}

impl Repair {
    /// For a prefill leg, and the decode leg that is being sent.
    pub fn new(
        cluster: Arc<Cluster>,
        leg: PrefillLeg,
        registration: Registration,
        leg_headers: LegHeaders,
    ) -> Self {
        let restarts = Restarts {
            prefill: leg.prefill.health.presence.restarts(),
            decode: leg.decode.health.presence.restarts(),
        };
        let leg = Arc::new(SentPrefill { leg, restarts });
        Self { cluster, leg, registration, leg_headers, progress: Progress::Failed }
    }

    /// Makes the call of the leg. If this future is dropped before the call has ended, the call is
    /// kept.
    ///
    /// # Errors
    /// As the call.
    pub async fn run(
        &mut self,
        leg_headers: LegHeaders,
        call: impl Future<Output = Result<LegReply, Error>> + Send + 'static,
    ) -> Result<LegReply, Error> {
        self.leg_headers = leg_headers;
        self.progress = Progress::UnderWay(Box::pin(call));
        let replied = poll_fn(|cx| match &mut self.progress {
            Progress::UnderWay(call) => call.as_mut().poll(cx),
            _ => Poll::Pending,
        })
        .await;
        self.progress = match &replied {
            Ok(replied) => self.leg.replied(replied),
            Err(_) => Progress::Failed,
        };
        replied
    }
}

impl Drop for Repair {
    fn drop(&mut self) {
        if !self.registration.may_wait() {
            return;
        }
        let (repairs, leg) = (&self.cluster.repairs, &self.leg);
        // As many as requests are served, so that clients which leave together are all repaired.
        let max = self.cluster.serving().limits.in_flight_max;
        let leg_headers = self.leg_headers.clone();
        // A repair that finds no room counts its leg as left.
        let _runs = match std::mem::replace(&mut self.progress, Progress::Replied) {
            Progress::UnderWay(call) => {
                repairs.run_among(max, Task::new(leg).booked().run(Some(call), leg_headers))
            }
            Progress::Pushes(until) if Instant::now() < until => {
                let task = Task::new(leg);
                repairs.run_among(max, async move {
                    if task.leg.still_runs(until).await {
                        task.not_needed();
                    } else {
                        task.booked().run(None, leg_headers).await;
                    }
                })
            }
            Progress::Failed | Progress::Pushes(_) => {
                repairs.run_among(max, Task::new(leg).booked().run(None, leg_headers))
            }
            Progress::Replied => return,
            Progress::AnotherReplied => return leg.count(leg.left()),
        };
    }
}

/// A repair that is to run, with what it books on both workers. If it is dropped before it has ended, its
/// decode leg counts as left.
struct Task {
    leg: Arc<SentPrefill>,
    /// The outcome for the metric; `None` if nothing waits any more.
    outcome: Option<&'static str>,
    bookings: Option<[Booking; 2]>,
}

impl Task {
    fn new(leg: &Arc<SentPrefill>) -> Self {
        Self { leg: Arc::clone(leg), outcome: Some(leg.left()), bookings: None }
    }

    /// Books the work of a leg that is sent.
    fn booked(mut self) -> Self {
        let leg = &self.leg;
        let prefill = leg.prefill.book(leg.prefill_rank, leg.uncached_tokens, leg.prompt_tokens);
        let decode = leg.decode.book(leg.decode_rank, 0, leg.prompt_tokens);
        self.bookings = Some([prefill, decode]);
        self
    }

    /// Ends the repair of a leg that nothing waits for.
    fn not_needed(mut self) {
        self.outcome = None;
    }

    /// Lets a call end, if one is under way, and sends the leg again until it ends well.
    async fn run(mut self, call: Option<Call>, leg_headers: LegHeaders) {
        let leg = Arc::clone(&self.leg);
        self.outcome = tokio::select! {
            outcome = leg.finish(call, leg_headers) => Some(outcome),
            () = leg.decode_gone() => None,
        };
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            self.leg.count(outcome);
        }
    }
}

/// A prefill leg that is sent again until it ends well.
struct SentPrefill {
    leg: PrefillLeg,
    restarts: Restarts,
}

impl Deref for SentPrefill {
    type Target = PrefillLeg;

    fn deref(&self) -> &PrefillLeg {
        &self.leg
    }
}

impl SentPrefill {
    /// Lets a call end, and sends the leg again until it ends well. Returns the outcome for the
    /// metric.
    async fn finish(&self, call: Option<Call>, leg_headers: LegHeaders) -> &'static str {
        let timeouts = &self.served.config.timeouts;
        let deadline = Instant::now() + REPAIR_MAX;
        let mut pause = PAUSE_MIN;
        let mut down_since = None;
        let mut call = call.unwrap_or_else(|| self.call(leg_headers.clone()));
        loop {
            let is_unreachable = match tokio::time::timeout(timeouts.prefill, call).await {
                Ok(Ok(replied)) => {
                    let is_other = matches!(self.replied(&replied), Progress::AnotherReplied);
                    return if is_other { self.left() } else { "finished" };
                }
                Ok(Err(error)) if error.is_lasting_refusal() => return self.left(),
                Ok(Err(error)) => error.kind() == ErrorKind::EngineUnreachable,
                Err(_) => false,
            };
            let is_down = is_unreachable || fails_probes(&self.prefill);
            down_since = down_since.filter(|_| is_down).or(is_down.then(Instant::now));
            tokio::time::sleep(pause).await;
            let is_dead = down_since.is_some_and(|at| at.elapsed() >= self.served.config.lease);
            let is_another = self.prefill.health.presence.restarts() != self.restarts.prefill;
            if is_dead || is_another || Instant::now() >= deadline {
                return self.left();
            }
            pause = (2 * pause).min(PAUSE_MAX);
            call = self.call(leg_headers.clone());
        }
    }

    /// Whether the prefill engine, which has replied, answers still: then it has sent the KV as soon as
    /// decode had registered. An engine that was killed in between has not.
    async fn still_runs(&self, until: Instant) -> bool {
        let (worker, since) = (&self.prefill, std::time::Instant::now());
        while Instant::now() < until && !worker.has_reported_since(since) {
            if worker.health.presence.restarts() != self.restarts.prefill || fails_probes(worker) {
                return false;
            }
            tokio::time::sleep(CHECK_EVERY).await;
        }
        worker.health.presence.restarts() == self.restarts.prefill
    }

    /// Sends the leg again.
    fn call(&self, leg_headers: LegHeaders) -> Call {
        let (served, worker) = (Arc::clone(&self.served), Arc::clone(&self.prefill));
        let body = RevocableBody::new(self.body.clone()).0.once();
        let shape = Shape::whole(self.endpoint);
        Box::pin(async move {
            // Many legs that failed together must not be too much for an engine that comes back.
            let _permit = worker.health.presence.resends.acquire().await;
            let leg = LegRequest {
                client: &served.client,
                worker: &worker,
                shape,
                headers: &leg_headers,
            };
            leg.whole(body).await
        })
    }

    /// Returns when the decode engine is gone. For an engine that is only out of reach, a leg that
    /// pushes runs on: if it is in vain, the prefill engine keeps the blocks until its lease ends.
    /// Mooncake's engines keep them for minutes, so there probes that fail are enough.
    async fn decode_gone(&self) {
        let is_there = || {
            let fails = self.pushes.is_none() && fails_probes(&self.decode);
            self.decode.health.presence.restarts() == self.restarts.decode && !fails
        };
        while is_there() {
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }

    /// How far the leg has come with a reply.
    fn replied(&self, replied: &LegReply) -> Progress {
        let Some(engine) = &self.pushes else { return Progress::Replied };
        match PushReply::from_body(&replied.body) {
            Ok(said) if said.engine == **engine => {
                let lease = self.served.config.lease;
                let lease = Lease::new(replied.begun, lease, None, Instant::now());
                Progress::Pushes(lease.ends())
            }
            _ => Progress::AnotherReplied,
        }
    }

    /// The outcome for the metric if no prefill leg can finish.
    fn left(&self) -> &'static str {
        if self.pushes.is_some() { STRANDED } else { "left" }
    }

    fn count(&self, outcome: &str) {
        let labels = [self.served.name(), outcome];
        self.metrics.unused_hand_offs.with_label_values(&labels).inc();
        if outcome != STRANDED {
            return;
        }
        self.served.pool.change_engine(&self.decode, |worker| worker.transfer.push.strand());
        if self.served.stranded.may_log() {
            tracing::warn!(
                model = self.served.name(),
                worker = self.decode.id(),
                prefill = self.prefill.id(),
                prompt_tokens = self.prompt_tokens,
                "a decode leg waits for KV that never comes: its engine keeps the blocks of the \
                 prompt until it is restarted (said at most twice a minute; \
                 unused_hand_offs_total counts)"
            );
        }
    }
}

/// Whether a worker's probes fail. A worker that has left the fleet is not probed.
fn fails_probes(worker: &Worker) -> bool {
    worker.health.presence.fails_probes() && !worker.gone.is_cancelled()
}
