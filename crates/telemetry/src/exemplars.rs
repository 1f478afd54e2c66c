//! Exemplars: for each bucket of a histogram, the trace of one request that fell into it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use prometheus::Histogram;

use crate::clock::unix_ms;
use crate::trace_context::TraceContext;

/// The id of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(u128);

impl From<TraceContext> for TraceId {
    fn from(context: TraceContext) -> Self {
        Self(context.trace_id)
    }
}

impl std::fmt::Display for TraceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// One request in a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exemplar {
    pub(crate) trace: TraceId,
    /// The value that was observed.
    pub(crate) value: f64,
    /// When, in milliseconds since 1970.
    pub(crate) unix_ms: u64,
}

/// The exemplars of one series: the latest of each bucket. Without traces they take no memory.
#[derive(Debug)]
pub(crate) struct Exemplars {
    bounds: &'static [f64],
    buckets: OnceLock<Box<[Bucket]>>,
}

/// The exemplar of one bucket.
type Bucket = Mutex<Option<Exemplar>>;

impl Exemplars {
    /// No exemplars yet, of a histogram with these upper bounds.
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, buckets: OnceLock::new() }
    }

    fn note(&self, value: f64, trace: TraceId) {
        let empty = || (0..=self.bounds.len()).map(|_| Mutex::new(None)).collect();
        let at = self.bounds.partition_point(|bound| *bound < value);
        let Some(bucket) = self.buckets.get_or_init(empty).get(at) else { return };
        // A request never waits for this: if another one is writing, its exemplar is as good.
        if let Ok(mut bucket) = bucket.try_lock() {
            *bucket = Some(Exemplar { trace, value, unix_ms: unix_ms() });
        }
    }

    /// The exemplar of the bucket with this number.
    pub(crate) fn of_bucket(&self, at: usize) -> Option<Exemplar> {
        let bucket = self.buckets.get()?.get(at)?;
        *bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A series of a histogram, with its exemplars.
#[derive(Clone, Debug)]
pub(crate) struct TracedHistogram {
    pub(crate) histogram: Histogram,
    pub(crate) exemplars: Arc<Exemplars>,
}

impl TracedHistogram {
    /// Records a value, with the trace that it belongs to.
    pub(crate) fn observe(&self, value: f64, trace: Option<TraceId>) {
        self.histogram.observe(value);
        if let Some(trace) = trace {
            self.exemplars.note(value, trace);
        }
    }
}

/// The exemplars of all series, by the name of the metric and the values of its labels. Bounded by
/// the number of series; requests use it only when they look up a series for the first time.
#[derive(Debug, Default)]
pub(crate) struct ExemplarStore(Mutex<HashMap<SeriesKey, Arc<Exemplars>>>);

/// The full name of a metric, and the pairs of names and values of its labels, sorted.
type SeriesKey = (String, Vec<(String, String)>);

impl ExemplarStore {
    /// The exemplars of a series.
    pub(crate) fn of_series(
        &self,
        metric: &str,
        labels: &[(&str, &str)],
        bounds: &'static [f64],
    ) -> Arc<Exemplars> {
        let exemplars = || Arc::new(Exemplars::new(bounds));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(key(metric, labels)).or_insert_with(exemplars))
    }

    /// Forgets the exemplars of all series with this label.
    pub(crate) fn forget(&self, (name, value): (&str, &str)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, labels), _| !labels.iter().any(|(n, v)| n == name && v == value));
    }

    /// The exemplars of a series, if it has a place for them.
    pub(crate) fn find(&self, metric: &str, labels: &[(&str, &str)]) -> Option<Arc<Exemplars>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&key(metric, labels)).map(Arc::clone)
    }
}

fn key(metric: &str, labels: &[(&str, &str)]) -> SeriesKey {
    let mut labels: Vec<_> =
        labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    labels.sort();
    (metric.to_owned(), labels)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_keeps_its_latest_trace() {
        let exemplars = Exemplars::new(&[0.1, 1.0]);
        let trace = TraceId;
        for (value, id) in [(0.1, 1), (0.05, 2), (0.5, 3), (7.0, 4)] {
            exemplars.note(value, trace(id));
        }
        let ids = [0, 1, 2].map(|at| exemplars.of_bucket(at).map(|one| one.trace.0));
        assert_eq!(ids, [Some(2), Some(3), Some(4)]);
        assert!(exemplars.of_bucket(3).is_none());
    }
}
