//! The queue of requests whose spans are to be exported, and the task that exports them.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use prometheus::IntCounterVec;
use rand::RngExt;
use splitrail_config::model::OtlpConfig;
use splitrail_ledger::timeline::RequestTrace;
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::trace_context::TraceContext;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::collector::{Collector, Connection, ExportMessage};
use super::spans::{EndedTrace, Resource};
use crate::identity::ClientTrace;

/// Number of waiting spans for which a batch is sent before its time.
const BATCH_SPANS: usize = 2048;
/// Size in bytes at which a batch is complete. Collectors take 4 MiB over gRPC by default.
const BATCH_BYTES: usize = 1 << 20;
/// Maximum time for which spans wait for further ones.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Pauses before a batch is sent again that the collector could not take at the time.
const PAUSES: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];

/// Usual maximum length of a span in bytes, on average over those of a request.
const USUAL_BYTES: usize = 256;

/// Puts the spans of requests into the queue.
pub(super) struct Export {
    sample_ratio: f64,
    queue: mpsc::Sender<QueuedSpans>,
    shared: Arc<QueueState>,
    /// The exporter, until its task is started.
    exporter: Mutex<Option<Exporter>>,
}

/// The spans of a request in the queue.
struct QueuedSpans {
    /// The spans, as they are written.
    bytes: Vec<u8>,
    /// Their number.
    spans: usize,
    /// The number that is counted of them while they wait: at least their number.
    counted: usize,
}

/// What both ends of the queue share.
struct QueueState {
    queued_spans: AtomicUsize,
    queue_spans_max: usize,
    /// Number of waiting spans for which a batch is sent before its time.
    batch_spans: usize,
    /// Notified when so many spans wait. Requests do not wake the exporter otherwise.
    is_due: Notify,
    /// Spans by result: `exported`, `dropped` or `failed`.
    spans: IntCounterVec,
}

impl QueueState {
    fn count(&self, result: &str, spans: usize) {
        self.spans.with_label_values(&[result]).inc_by(spans as u64);
    }
}

/// Sends the spans in the queue to the collector.
pub struct Exporter {
    queued: mpsc::Receiver<QueuedSpans>,
    shared: Arc<QueueState>,
    resource: Resource,
    collector: Collector,
    /// The connection of the last batch.
    connection: Option<Connection>,
    log_throttle: LogThrottle,
    /// Whether the last batch was refused.
    is_failing: bool,
}

/// Spans that are sent at once.
#[derive(Default)]
struct Batch {
    /// The spans, as they are written.
    bytes: Vec<u8>,
    /// Their number.
    spans: usize,
}

impl Export {
    pub(super) fn open(config: &OtlpConfig, metrics: &Metrics) -> Result<Self, String> {
        let collector = Collector::new(config)?;
        // A request has at least one span.
        let (queue, queued) = mpsc::channel(config.queue_spans_max);
        let shared = Arc::new(QueueState {
            queued_spans: AtomicUsize::new(0),
            queue_spans_max: config.queue_spans_max,
            // Spans arrive while a batch is sent.
            batch_spans: BATCH_SPANS.min(config.queue_spans_max / 2),
            is_due: Notify::new(),
            spans: metrics.spans.clone(),
        });
        let exporter = Exporter {
            queued,
            shared: Arc::clone(&shared),
            resource: Resource::new(&config.service_name),
            collector,
            connection: None,
            log_throttle: LogThrottle::default(),
            is_failing: false,
        };
        let exporter = Mutex::new(Some(exporter));
        Ok(Self { sample_ratio: config.sample_ratio, queue, shared, exporter })
    }

    pub(super) fn begin(&self, client: &ClientTrace) -> Option<RequestTrace> {
        let parent = client.context();
        let mut random = rand::rng();
        let is_sampled = match parent {
            Some(parent) => parent.is_sampled,
            None => self.sample_ratio >= 1.0 || random.random::<f64>() < self.sample_ratio,
        };
        if !is_sampled {
            return None;
        }
        // 0 is no valid id.
        let trace_id = parent.map_or_else(|| random.random::<u128>().max(1), |p| p.trace_id);
        let span_id = random.random::<u64>().max(1);
        let state = client.tracestate.as_ref().filter(|_| parent.is_some());
        Some(RequestTrace {
            context: TraceContext { trace_id, span_id, is_sampled },
            parent_id: parent.map(|parent| parent.span_id),
            state: state.and_then(|state| state.to_str().ok()).map(Into::into),
        })
    }

    pub(super) fn submit(&self, ended: &EndedTrace<'_>) {
        let QueueState { queued_spans, queue_spans_max, batch_spans, is_due, .. } = &*self.shared;
        let counted = ended.count_max();
        let before = queued_spans.fetch_add(counted, Relaxed);
        let after = before + counted;
        if after > *queue_spans_max || !self.write(ended, counted) {
            queued_spans.fetch_sub(counted, Relaxed);
            self.shared.count("dropped", ended.count());
        } else if before < *batch_spans && after >= *batch_spans {
            is_due.notify_one();
        }
    }

    /// Writes the spans of a request and puts them into the queue; returns whether it takes them.
    fn write(&self, ended: &EndedTrace<'_>, counted: usize) -> bool {
        let mut bytes = Vec::with_capacity(USUAL_BYTES * counted);
        let spans = ended.put_spans(&mut bytes);
        self.queue.try_send(QueuedSpans { bytes, spans, counted }).is_ok()
    }

    pub(super) fn take_exporter(&self) -> Option<Exporter> {
        self.exporter.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Exporter {
    /// Exports spans until `stop`, and then those that are left in the queue.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut batch = Batch::default();
        loop {
            let is_last = self.fill(&mut batch, &stop).await;
            if batch.spans > 0 {
                let head = self.resource.head(batch.bytes.len()).into();
                let message = ExportMessage { head, spans: mem::take(&mut batch.bytes).into() };
                self.send(&message, mem::take(&mut batch.spans), &stop).await;
                batch.bytes = emptied(message.spans);
            }
            if is_last {
                return;
            }
        }
    }

    /// Waits until a batch is due, and takes it. Returns whether there are no further ones.
    async fn fill(&mut self, batch: &mut Batch, stop: &CancellationToken) -> bool {
        let is_open = !self.queued.is_closed();
        let first = tokio::select! {
            biased;
            () = stop.cancelled(), if is_open => None,
            first = self.queued.recv() => Some(first),
        };
        match first {
            // What is in the queue is still received.
            None => self.queued.close(),
            Some(None) => return true,
            Some(Some(first)) => {
                self.take(batch, first);
                let waiting = batch.spans + self.shared.queued_spans.load(Relaxed);
                if is_open && waiting < self.shared.batch_spans {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = self.shared.is_due.notified() => {}
                        () = sleep(BATCH_INTERVAL) => {}
                    }
                }
            }
        }
        while batch.bytes.len() < BATCH_BYTES {
            match self.queued.try_recv() {
                Ok(queued) => self.take(batch, queued),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    fn take(&self, batch: &mut Batch, QueuedSpans { bytes, spans, counted }: QueuedSpans) {
        self.shared.queued_spans.fetch_sub(counted, Relaxed);
        batch.bytes.extend_from_slice(&bytes);
        batch.spans += spans;
    }

    /// Sends spans, several times if the collector cannot take them at the time. Requests wait in
    /// the queue meanwhile.
    async fn send(&mut self, message: &ExportMessage, count: usize, stop: &CancellationToken) {
        let mut pauses = PAUSES.iter();
        loop {
            let refused = match self.collector.send(&mut self.connection, message).await {
                Ok(rejected) => return self.sent(count, rejected.min(count)),
                Err(refused) => refused,
            };
            self.warn(&refused.why);
            let pause = pauses.next().filter(|_| refused.is_passing);
            let is_over = async |pause| timeout(pause, stop.cancelled()).await.is_err();
            match pause {
                Some(pause) if is_over(*pause).await => {}
                // Nothing is sent again while the router stops.
                _ => return self.shared.count("failed", count),
            }
        }
    }

    fn sent(&mut self, count: usize, rejected: usize) {
        self.shared.count("exported", count - rejected);
        if rejected > 0 {
            self.shared.count("failed", rejected);
            self.warn("it rejects spans");
        } else if mem::take(&mut self.is_failing) {
            tracing::info!("the collector of traces takes spans again");
        }
    }

    fn warn(&mut self, why: &str) {
        self.is_failing = true;
        if self.log_throttle.may_log() {
            tracing::warn!(
                why,
                "the collector of traces does not take spans (said at most twice a minute; \
                 splitrail_spans_total counts)"
            );
        }
    }
}

/// The memory of bytes that were sent, for further ones; new memory if a connection still has them.
fn emptied(sent: Bytes) -> Vec<u8> {
    if !sent.is_unique() {
        return Vec::new();
    }
    let mut bytes = Vec::from(sent);
    bytes.clear();
    bytes
}
