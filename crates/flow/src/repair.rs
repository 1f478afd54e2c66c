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
//! prefill leg that has failed is sent again. If the decode engine is gone, nothing waits there, and the
//! prefill engine would keep the blocks instead: then the leg is cancelled.
//!
//! With `NixlPushConnector`, only the engine with which decode has registered can free the blocks. If it
//! is gone, the decode leg is stranded: its engine keeps the blocks until it is restarted.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use splitrail_api::error::{Error, Fault};
use splitrail_api::{Endpoint, Parts};
use splitrail_engine::nixl_push::{PushEngine, PushReply};
use splitrail_engine_client::{Engine, Envelope, Parcel, Receipt, Shape};
use splitrail_fleet::{Served, Worker};
use splitrail_telemetry::Metrics;
use tokio::time::Instant;

use super::context::Context;
use super::lease::Lease;
use super::place::Placed;
use super::prefill::Replied;

/// How long a pair is repaired: as long as the engines wait for each other by default.
const REPAIR_MAX: Duration = Duration::from_secs(480);

/// The pause after an attempt that failed: the first one, doubled each time up to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// How often it is checked whether the decode engine is still there.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// The outcome of a leg whose decode engine keeps the blocks until it is restarted.
const STRANDED: &str = "stranded";

/// The call of a prefill leg, which can outlive its request.
type Call = Pin<Box<dyn Future<Output = Result<Replied, Error>> + Send>>;

/// A decode leg that its engine may have registered with the prefill engine.
#[derive(Clone, Debug)]
pub(super) struct Registration {
    receipt: Receipt,
    answered: Arc<AtomicBool>,
}

impl Registration {
    /// For a leg that is about to be sent with the body of this receipt.
    pub(super) fn new(receipt: Receipt) -> Self {
        Self { receipt, answered: Arc::default() }
    }

    /// Notes how the leg ended. An engine that has answered, if only with an error, does not wait.
    pub(super) fn ended<T>(&self, begun: &Result<T, Error>) {
        let answered = begun.as_ref().err().is_none_or(Error::is_reply);
        self.answered.store(answered, Relaxed);
    }

    /// Whether the engine may have the leg and wait for its KV. If not, it will not get the leg
    /// either.
    fn may_wait(&self) -> bool {
        !self.answered.load(Relaxed) && !self.receipt.take_back()
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
pub(super) struct Repair {
    leg: Arc<PrefillLeg>,
    registration: Registration,
    envelope: Envelope,
    progress: Progress,
}

/// What is needed to send a prefill leg again.
struct PrefillLeg {
    served: Arc<Served>,
    metrics: Arc<Metrics>,
    endpoint: Endpoint,
    worker: Arc<Worker>,
    body: Parts,
    decode: Arc<Worker>,
    /// The engine with which decode registers, if it pushes, and the prompt's length for the log.
    pushes: Option<(Arc<PushEngine>, u64)>,
    /// The processes of the prefill and the decode engine. Another process knows nothing of the pair.
    processes: [u64; 2],
}

impl Repair {
    /// For a prefill leg with this body, and the decode leg on `decode`.
    pub(super) fn new(
        context: &Context,
        prefill: &Placed,
        decode: &Placed,
        registration: Registration,
        body: Parts,
        envelope: &Envelope,
    ) -> Self {
        let leg = PrefillLeg {
            served: Arc::clone(&context.served),
            metrics: Arc::clone(&context.metrics),
            endpoint: context.endpoint,
            worker: Arc::clone(&prefill.worker),
            body,
            decode: Arc::clone(&decode.worker),
            pushes: None,
            processes: [prefill.worker.process(), decode.worker.process()],
        };
        let envelope = prefill.pinned(envelope);
        Self { leg: Arc::new(leg), registration, envelope, progress: Progress::Failed }
    }

    /// For a pair whose decode engine registers with `engine`, which pushes the KV of so many tokens.
    pub(super) fn of_push(mut self, engine: Arc<PushEngine>, prompt_tokens: u64) -> Self {
        // No one else has the leg yet.
        if let Some(leg) = Arc::get_mut(&mut self.leg) {
            leg.pushes = Some((engine, prompt_tokens));
        }
        self
    }

    /// Makes the call of the leg. If this future is dropped before the call has ended, the call is
    /// kept.
    pub(super) async fn run(
        &mut self,
        envelope: Envelope,
        call: impl Future<Output = Result<Replied, Error>> + Send + 'static,
    ) -> Result<Replied, Error> {
        self.envelope = envelope;
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
        let (leg, envelope) = (Arc::clone(&self.leg), self.envelope.clone());
        let call = match std::mem::replace(&mut self.progress, Progress::Replied) {
            Progress::UnderWay(call) => call,
            Progress::Failed => leg.call(envelope.clone()),
            Progress::Pushes(until) if Instant::now() >= until => leg.call(envelope.clone()),
            Progress::Replied | Progress::Pushes(_) => return,
            Progress::AnotherReplied => return leg.count(leg.left()),
        };
        let task = Arc::clone(&leg);
        let repair = async move {
            tokio::select! {
                outcome = task.finish(call, envelope) => task.count(outcome),
                () = task.decode_gone() => {}
            }
        };
        if !leg.served.releases.run(repair) {
            leg.count(leg.left());
        }
    }
}

impl PrefillLeg {
    /// Lets a call end, and sends the leg again until it ends well. Returns the outcome for the
    /// metric.
    async fn finish(&self, mut call: Call, envelope: Envelope) -> &'static str {
        let deadline = Instant::now() + REPAIR_MAX;
        let [mut pause, longest] = PAUSES;
        loop {
            let limit = self.served.config.timeouts.prefill;
            match tokio::time::timeout(limit, call).await {
                Ok(Ok(replied)) => {
                    let is_other = matches!(self.replied(&replied), Progress::AnotherReplied);
                    return if is_other { self.left() } else { "finished" };
                }
                Ok(Err(error)) if error.fault() == Fault::Client => return self.left(),
                Ok(Err(_)) | Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            if Instant::now() >= deadline || !is_there(&self.worker, self.processes[0]) {
                return self.left();
            }
            pause = (2 * pause).min(longest);
            call = self.call(envelope.clone());
        }
    }

    fn call(&self, envelope: Envelope) -> Call {
        let (served, worker) = (Arc::clone(&self.served), Arc::clone(&self.worker));
        let body = Parcel::new(self.body.clone()).0.once();
        let shape = Shape::whole(self.endpoint);
        Box::pin(async move {
            let response = served.client.post(&*worker, shape, body, &envelope).await?;
            let begun = Instant::now();
            Ok(Replied { body: served.client.whole(&*worker, response).await?, begun, peer: None })
        })
    }

    /// Returns when the decode engine is gone.
    async fn decode_gone(&self) {
        while is_there(&self.decode, self.processes[1]) {
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }

    /// How far the leg has come with a reply.
    fn replied(&self, replied: &Replied) -> Progress {
        let Some((engine, _)) = &self.pushes else { return Progress::Replied };
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
        self.decode.push.strand();
        if self.served.stranded.may_log() {
            tracing::warn!(
                model = self.served.name(),
                worker = self.decode.id(),
                prefill = self.worker.id(),
                prompt_tokens = self.pushes.as_ref().map(|(_, tokens)| *tokens),
                "a decode leg waits for KV that never comes: its engine keeps the blocks of the \
                 prompt until it is restarted (said at most twice a minute; \
                 unused_hand_offs_total counts)"
            );
        }
    }
}

/// Whether an engine can be reached and no other process is in its place.
fn is_there(worker: &Worker, process: u64) -> bool {
    worker.is_up() && worker.process() == process && !worker.gone.is_cancelled()
}
