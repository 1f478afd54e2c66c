//! The figures of a run.

use serde::Serialize;
use splitrail_policy::loss::Loss;
use splitrail_sim::cluster::{RequestResult, SimulationResult, Workload};

use crate::compare::Difference;
use crate::loss::loss;

/// Mean and percentiles (nearest rank), in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean_s: f64,
    /// Median.
    pub p50_s: f64,
    /// 90th percentile.
    pub p90_s: f64,
    /// 99th percentile.
    pub p99_s: f64,
}

impl Spread {
    /// Of times in nanoseconds; zeros if there are none.
    pub fn of(mut times_ns: Vec<u64>) -> Self {
        times_ns.sort_unstable();
        let count = times_ns.len();
        if count == 0 {
            return Self::default();
        }
        let rank = |percent: usize| times_ns[(percent * count).div_ceil(100) - 1] as f64 / 1e9;
        let sum: u128 = times_ns.iter().map(|time| u128::from(*time)).sum();
        Self {
            mean_s: sum as f64 / count as f64 / 1e9,
            p50_s: rank(50),
            p90_s: rank(90),
            p99_s: rank(99),
        }
    }
}

/// The figures of one policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PolicyReport {
    /// The name of the policy.
    pub policy: String,
    /// The share of time for which all prefill workers would be busy if nothing were cached, if it
    /// determined the rate.
    pub load: Option<f64>,
    /// Number of requests of the trace.
    pub requests: usize,
    /// Number of requests that were refused.
    pub rejected: usize,
    /// Number of requests that a decode worker prefilled itself.
    pub local: usize,
    /// Share of blocks that needed no computing, in percent.
    pub hit_percent: f64,
    /// The same, relative to what a shared cache of unlimited size would have found.
    pub ceiling_percent: f64,
    /// Time from arrival to the first token.
    pub ttft: Spread,
    /// The mean of the longest tenth of the intervals between tokens of each request.
    pub tbt: Spread,
    /// Share of requests with a TTFT of at most 30 s and a TBT of at most 200 ms, in percent.
    pub good30_percent: f64,
    /// The same with a TTFT of at most 5 s.
    pub good5_percent: f64,
    /// The same with a TTFT of at most 5 s and a TBT of at most 50 ms.
    pub good5_50ms_percent: f64,
    /// The busy time of the busiest prefill worker, relative to the mean.
    pub imbalance: f64,
    /// The mean busy time of the prefill workers, relative to the time of the last arrival.
    pub utilisation: f64,
    /// Where cache hits were lost.
    pub loss: Loss,
    /// The differences from the first of two reports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differences: Option<Vec<Difference>>,
}

const SECOND_NS: u64 = 1_000_000_000;
const MILLISECOND_NS: u64 = 1_000_000;

impl PolicyReport {
    /// Computes the figures of an outcome.
    pub fn new(policy: &str, workload: &Workload, outcome: &SimulationResult) -> Self {
        let rows = &outcome.rows;
        let requests = rows.len();
        let mut scratch = Vec::new();
        let served: Vec<(u64, u64)> = rows
            .iter()
            .enumerate()
            .filter(|(_, row)| !row.rejected)
            .map(|(i, row)| {
                let output = workload.requests()[i].output_tokens;
                (row.ttft_ns(), outcome.tbt_ns(i, output, &mut scratch))
            })
            .collect();
        let good = |ttft_ns: u64, tbt_ns: u64| {
            let count = served.iter().filter(|(t, b)| *t <= ttft_ns && *b <= tbt_ns).count();
            percent(count as f64, requests as f64)
        };
        let hits: u64 = rows.iter().map(|row| u64::from(row.hit_blocks)).sum();
        let local =
            |row: &&RequestResult| row.decode_worker.is_some() && row.prefill_worker.is_none();
        let busy = &outcome.prefill_busy_ns;
        let busy_mean = busy.iter().sum::<u64>() as f64 / busy.len().max(1) as f64;
        let last_arrival = rows.last().map_or(0, |row| row.arrival_ns);
        Self {
            policy: policy.to_owned(),
            load: None,
            requests,
            rejected: requests - served.len(),
            local: rows.iter().filter(local).count(),
            hit_percent: percent(hits as f64, workload.total_blocks() as f64),
            ceiling_percent: percent(hits as f64, workload.ceiling_blocks() as f64),
            ttft: Spread::of(served.iter().map(|(ttft, _)| *ttft).collect()),
            tbt: Spread::of(served.iter().map(|(_, tbt)| *tbt).collect()),
            good30_percent: good(30 * SECOND_NS, 200 * MILLISECOND_NS),
            good5_percent: good(5 * SECOND_NS, 200 * MILLISECOND_NS),
            good5_50ms_percent: good(5 * SECOND_NS, 50 * MILLISECOND_NS),
            imbalance: ratio(busy.iter().copied().max().unwrap_or(0) as f64, busy_mean),
            utilisation: ratio(busy_mean, last_arrival as f64),
            loss: loss(workload, outcome),
            differences: None,
        }
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn percent(part: f64, whole: f64) -> f64 {
    100.0 * ratio(part, whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_use_the_nearest_rank() {
        let spread = Spread::of((1..=10).rev().map(|i| i * SECOND_NS).collect());
        assert_eq!(spread, Spread { mean_s: 5.5, p50_s: 5.0, p90_s: 9.0, p99_s: 10.0 });
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }
}
