//! How long the parts of a request take up to its first token.

use std::collections::BTreeMap;

use prometheus::proto::Histogram;
use splitrail_telemetry::figure::rounded;

/// The parts in the order in which a request has them, by the names of the metrics. `queue` is
/// `queue_wait_seconds`.
const STAGES: [&str; 9] = [
    "queue",
    "tokenize",
    "match",
    "pick",
    "decode_try",
    "peer_fetch",
    "prefill",
    "first_token",
    "failed",
];

/// The part that each prompt with a reply has once.
const LAST: &str = "first_token";

/// The counters of the parts at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct StageReadings([StageReading; STAGES.len()]);

#[derive(Clone, Copy, Debug, Default)]
struct StageReading {
    count: u64,
    sum_s: f64,
}

impl StageReadings {
    /// Adds a histogram of a part; others than those that are known are left out.
    pub(super) fn add(&mut self, stage: &str, histogram: &Histogram) {
        if let Some(at) = STAGES.iter().position(|known| *known == stage) {
            self.0[at].count += histogram.get_sample_count();
            self.0[at].sum_s += histogram.get_sample_sum();
        }
    }

    /// Milliseconds of each part for a prompt, in the mean of those that were answered since an
    /// earlier reading. The parts add up to what such a prompt took. Parts that nothing took are left
    /// out; empty if no prompt was answered.
    pub(super) fn means_ms(&self, earlier: &Self) -> BTreeMap<&'static str, f64> {
        let since = || {
            let both = STAGES.into_iter().zip(self.0.iter().zip(&earlier.0));
            both.map(|(stage, (to, from))| {
                let count = to.count.saturating_sub(from.count);
                (stage, count, (to.sum_s - from.sum_s).max(0.0))
            })
        };
        let prompts = since().find(|(stage, ..)| *stage == LAST).map_or(0, |(_, count, _)| count);
        let taken = since().filter(|(_, count, _)| *count > 0 && prompts > 0);
        taken
            .filter_map(|(stage, _, sum_s)| Some((stage, rounded(sum_s * 1e3 / prompts as f64)?)))
            .collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus::core::Collector as _;
    use prometheus::{Histogram as Live, HistogramOpts};

    use super::*;

    /// What histograms with these values have counted, by stage.
    fn read(stages: &[(&str, &[f64])]) -> StageReadings {
        let mut readings = StageReadings::default();
        for (stage, values) in stages {
            let live = Live::with_opts(HistogramOpts::new("h", "h")).unwrap();
            values.iter().for_each(|value| live.observe(*value));
            readings.add(stage, live.collect()[0].get_metric()[0].get_histogram());
        }
        readings
    }

    #[test]
    fn the_parts_of_a_mean_prompt_add_up() {
        let before = read(&[("queue", &[9.0]), ("first_token", &[9.0])]);
        assert_eq!(before.means_ms(&before), BTreeMap::new());
        // Two prompts: one waited, and one was prefilled by another worker after a leg had failed.
        let after = read(&[
            ("queue", &[9.0, 0.5]),
            ("tokenize", &[0.002, 0.004]),
            ("prefill", &[0.25]),
            ("failed", &[0.125]),
            ("first_token", &[9.0, 0.5, 0.25]),
            ("unknown", &[1.0]),
        ]);
        let expected = [
            ("queue", 250.0),
            ("tokenize", 3.0),
            ("prefill", 125.0),
            ("failed", 62.5),
            ("first_token", 375.0),
        ];
        assert_eq!(after.means_ms(&before), BTreeMap::from(expected));
    }
}
