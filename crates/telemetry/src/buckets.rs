//! Percentiles of what a histogram has counted between two readings.

use prometheus::proto::Histogram;
use serde::Serialize;

use crate::figure::rounded;

/// The buckets of a histogram at one time, as counts of each bucket alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Buckets {
    /// Upper bound of each bucket and its count. The last bucket has no bound: it has the count of
    /// all that is larger.
    counts: Vec<(f64, u64)>,
}

/// Percentiles in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// Nine of ten are smaller.
    pub p90: f64,
    /// 99 of 100 are smaller.
    pub p99: f64,
}

impl Buckets {
    /// Adds a histogram, which must have the same buckets as those before.
    pub fn add(&mut self, histogram: &Histogram) {
        let mut before = 0;
        let bounded = histogram
            .get_bucket()
            .iter()
            .map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
        let all = bounded.chain([(f64::INFINITY, histogram.get_sample_count())]);
        for (at, (bound, cumulative)) in all.enumerate() {
            // The counts of a histogram that is being updated need not be consistent.
            let count = cumulative.saturating_sub(std::mem::replace(&mut before, cumulative));
            match self.counts.get_mut(at) {
                Some((_, sum)) => *sum += count,
                None => self.counts.push((bound, count)),
            }
        }
    }

    /// What was counted since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |at: usize| earlier.counts.get(at).map_or(0, |(_, count)| *count);
        let counts = self.counts.iter().enumerate();
        let counts = counts.map(|(at, (bound, count))| (*bound, count.saturating_sub(before(at))));
        Self { counts: counts.collect() }
    }

    /// The percentiles of durations in seconds; `None` if nothing was counted. Values are taken to
    /// be spread evenly in their bucket, and to equal the largest bound beyond it.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let all: u64 = self.counts.iter().map(|(_, count)| count).sum();
        let ms = |quantile: f64| rounded(self.quantile(quantile * all as f64)? * 1e3);
        (all > 0)
            .then(|| Some(Percentiles { p50: ms(0.5)?, p90: ms(0.9)?, p99: ms(0.99)? }))
            .flatten()
    }

    /// The value below which `rank` of the counted values are.
    fn quantile(&self, rank: f64) -> Option<f64> {
        let (mut below, mut lower) = (0.0, 0.0);
        for (bound, count) in &self.counts {
            let count = *count as f64;
            if bound.is_infinite() {
                break;
            }
            if count > 0.0 && below + count >= rank {
                return Some(lower + (bound - lower) * ((rank - below) / count));
            }
            (below, lower) = (below + count, *bound);
        }
        Some(lower)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus::core::Collector as _;
    use prometheus::{Histogram as Live, HistogramOpts};

    use super::*;

    fn read(histogram: &Live) -> Buckets {
        let mut buckets = Buckets::default();
        for family in histogram.collect() {
            family.get_metric().iter().for_each(|series| buckets.add(series.get_histogram()));
        }
        buckets
    }

    #[test]
    fn percentiles_are_those_of_what_came_between_two_readings() {
        let options = HistogramOpts::new("h", "h").buckets(vec![0.1, 0.2, 1.0]);
        let histogram = Live::with_opts(options).unwrap();
        (0..50).for_each(|_| histogram.observe(0.9));
        let before = read(&histogram);
        assert_eq!(before.since(&before).percentiles(), None);
        (0..100).for_each(|_| histogram.observe(0.15));
        let found = read(&histogram).since(&before).percentiles().unwrap();
        assert_eq!(found, Percentiles { p50: 150.0, p90: 190.0, p99: 199.0 });
        // Beyond the last bound, nothing more is known.
        (0..900).for_each(|_| histogram.observe(7.0));
        let found = read(&histogram).since(&before).percentiles().unwrap();
        assert_eq!((found.p50, found.p99), (1000.0, 1000.0));
    }

    #[test]
    fn several_series_are_read_as_one() {
        let options = HistogramOpts::new("h", "h").buckets(vec![0.1, 0.2]);
        let histogram = Live::with_opts(options).unwrap();
        histogram.observe(0.05);
        let mut both = read(&histogram);
        for family in histogram.collect() {
            family.get_metric().iter().for_each(|series| both.add(series.get_histogram()));
        }
        assert_eq!(both.counts, [(0.1, 2), (0.2, 0), (f64::INFINITY, 0)]);
    }
}
