//! The queue of requests whose spans are to be exported, and the task that exports them.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::IntCounterVec;
use prost::Message;
use rand::RngExt;
use splitrail_config::model::OtlpConfig;
use splitrail_ledger::timeline::RequestTrace;
use splitrail_telemetry::trace_context::TraceContext;
use splitrail_telemetry::{LogThrottle, Metrics};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::collector::Collector;
use super::spans::{Ended, Resource};
use crate::identity::ClientTrace;

/// Number of spans that are sent at once, if as many wait.
const BATCH_SPANS: usize = 512;
/// Maximum time for which spans wait for further ones.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Pauses before a batch is sent again that the collector could not take at the time.
const PAUSES: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];

/// Puts requests into the queue.
pub(super) struct Export {
    sample_ratio: f64,
    queue: mpsc::Sender<Queued>,
    shared: Arc<Shared>,
    /// The exporter, until its task is started.
    exporter: Mutex<Option<Exporter>>,
}

/// A request in the queue, with the number of its spans.
struct Queued {
    ended: Ended,
    spans: usize,
}

/// What both ends of the queue share.
struct Shared {
    queued_spans: AtomicUsize,
    queue_spans_max: usize,
    /// Spans by result: `exported`, `dropped` or `failed`.
    spans: IntCounterVec,
}

impl Shared {
    fn count(&self, result: &str, spans: usize) {
        self.spans.with_label_values(&[result]).inc_by(spans as u64);
    }
}

/// Makes spans of the requests in the queue and sends them to the collector.
pub struct Exporter {
    queued: mpsc::Receiver<Queued>,
    shared: Arc<Shared>,
    resource: Resource,
    collector: Collector,
    said: LogThrottle,
    /// Whether the last batch was refused.
    is_failing: bool,
}

impl Export {
    pub(super) fn open(config: &OtlpConfig, metrics: &Metrics) -> Result<Self, String> {
        let collector = Collector::new(config)?;
        // A request has at least one span.
        let (queue, queued) = mpsc::channel(config.queue_spans_max);
        let shared = Arc::new(Shared {
            queued_spans: AtomicUsize::new(0),
            queue_spans_max: config.queue_spans_max,
            spans: metrics.spans.clone(),
        });
        let exporter = Exporter {
            queued,
            shared: Arc::clone(&shared),
            resource: Resource::new(&config.service_name),
            collector,
            said: LogThrottle::default(),
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

    pub(super) fn submit(&self, ended: Ended) {
        let spans = ended.count();
        let queued = self.shared.queued_spans.fetch_add(spans, Relaxed);
        let fits = queued + spans <= self.shared.queue_spans_max;
        if !fits || self.queue.try_send(Queued { ended, spans }).is_err() {
            self.shared.queued_spans.fetch_sub(spans, Relaxed);
            self.shared.count("dropped", spans);
        }
    }

    pub(super) fn take_exporter(&self) -> Option<Exporter> {
        self.exporter.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Exporter {
    /// Exports spans until `stop`, and then those that are left in the queue.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut batch: Vec<Span> = Vec::new();
        loop {
            let is_last = self.fill(&mut batch, &stop).await;
            let spans = mem::take(&mut batch);
            if !spans.is_empty() {
                self.send(spans, &stop).await;
            }
            if is_last {
                return;
            }
        }
    }

    /// Waits for spans. Returns whether there are no further ones.
    async fn fill(&mut self, batch: &mut Vec<Span>, stop: &CancellationToken) -> bool {
        let mut until = None;
        while batch.len() < BATCH_SPANS {
            let is_open = !self.queued.is_closed();
            let next = async {
                match until {
                    None => Ok(self.queued.recv().await),
                    Some(until) => timeout_at(until, self.queued.recv()).await,
                }
            };
            let next = tokio::select! {
                biased;
                () = stop.cancelled(), if is_open => None,
                next = next => Some(next),
            };
            match next {
                // What is in the queue is still received.
                None => self.queued.close(),
                Some(Ok(Some(queued))) => self.take(batch, queued),
                Some(Ok(None)) => return true,
                // It is time to send what there is.
                Some(Err(_)) => return false,
            }
            until.get_or_insert_with(|| Instant::now() + BATCH_INTERVAL);
        }
        false
    }

    fn take(&self, batch: &mut Vec<Span>, Queued { ended, spans }: Queued) {
        self.shared.queued_spans.fetch_sub(spans, Relaxed);
        batch.extend(ended.into_spans());
    }

    /// Sends spans, several times if the collector cannot take them at the time. Requests wait in
    /// the queue meanwhile.
    async fn send(&mut self, spans: Vec<Span>, stop: &CancellationToken) {
        let count = spans.len();
        let resource_spans = vec![self.resource.spans(spans)];
        let body = ExportTraceServiceRequest { resource_spans }.encode_to_vec().into();
        let mut pauses = PAUSES.iter();
        loop {
            let refused = match self.collector.send(&body).await {
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
        if self.said.may_log() {
            tracing::warn!(
                why,
                "the collector of traces does not take spans (said at most twice a minute; \
                 splitrail_spans_total counts)"
            );
        }
    }
}
