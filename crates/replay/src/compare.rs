//! Compares two ways to serve the same trace, and tests which differences may be chance.
//!
//! A trace is one sample of the traffic that might have arrived. How much of a difference is due to
//! chance is estimated by drawing other traces from it: stretches of consecutive requests, since
//! neighbours share bursts and queues, with replacement. Both sides use the same draws, so that
//! difficulties of a stretch cancel out.

use serde::Serialize;
use splitrail_policy::mix;
use splitrail_sim::cluster::{SimulationResult, Workload};

/// Number of stretches into which a trace is cut.
const STRETCHES: usize = 50;
/// Number of traces that are drawn.
const DRAWS: usize = 400;
/// The positions of the bounds of the middle 95 % among 400 sorted differences.
const ENDS: (usize, usize) = (10, 389);

/// One measure on both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The name of the measure.
    pub measure: &'static str,
    /// The value on the first side.
    pub first: f64,
    /// The value on the second side.
    pub second: f64,
    /// Second value minus first value.
    pub difference: f64,
    /// 95 % of the drawn traces have a difference of at least this,
    pub low: f64,
    /// and at most this.
    pub high: f64,
    /// Whether both bounds are on the same side of 0.
    pub matters: bool,
}

/// The result of one request on one side.
#[derive(Clone, Copy)]
struct Sample {
    /// `None` if it was refused.
    ttft_s: Option<f64>,
    hit_blocks: f64,
    blocks: f64,
}

type Measure = (&'static str, fn(&mut [Sample]) -> f64);

const MEASURES: [Measure; 6] = [
    ("TTFT mean, s", mean),
    ("TTFT p50, s", |samples| percentile(samples, 50)),
    ("TTFT p99, s", |samples| percentile(samples, 99)),
    ("TTFT <= 5 s, %", |samples| share(samples, |s| s.ttft_s.is_some_and(|ttft_s| ttft_s <= 5.0))),
    ("hits, % of blocks", hits),
    ("refused, %", |samples| share(samples, |s| s.ttft_s.is_none())),
];

/// The differences of two outcomes of the same trace.
pub fn compare(
    workload: &Workload,
    first: &SimulationResult,
    second: &SimulationResult,
) -> Vec<Difference> {
    let sides = [samples(workload, first), samples(workload, second)];
    let mut scratch = Vec::with_capacity(sides[0].len());
    let mut differences: Vec<Difference> = MEASURES
        .iter()
        .map(|(measure, figure)| {
            let [first, second] = sides.each_ref().map(|side| figure(&mut side.clone()));
            let difference = second - first;
            Difference { measure, first, second, difference, low: 0.0, high: 0.0, matters: false }
        })
        .collect();
    let mut drawn = vec![Vec::with_capacity(DRAWS); MEASURES.len()];
    for draw in 0..DRAWS {
        for ((_, figure), drawn) in MEASURES.iter().zip(&mut drawn) {
            let [first, second] = sides.each_ref().map(|side| {
                redraw(side, draw, &mut scratch);
                figure(&mut scratch)
            });
            drawn.push(second - first);
        }
    }
    for (difference, mut drawn) in differences.iter_mut().zip(drawn) {
        drawn.sort_by(f64::total_cmp);
        (difference.low, difference.high) = (drawn[ENDS.0], drawn[ENDS.1]);
        difference.matters = difference.low > 0.0 || difference.high < 0.0;
    }
    differences
}

/// Formats the differences as lines.
pub fn table(differences: &[Difference], first: &str, second: &str) -> String {
    let mut text = format!("{second} against {first}, and 95 % of traces drawn from this one:\n");
    for difference in differences {
        let Difference { measure, first, second, difference, low, high, matters } = difference;
        let verdict = match matters {
            true => "",
            false if *difference == 0.0 => "  (the same)",
            false => "  (may be chance)",
        };
        text += &format!(
            "{measure:<18} {first:>10.3} -> {second:>10.3}  {difference:>+10.3}  \
             [{low:+.3}, {high:+.3}]{verdict}\n"
        );
    }
    text
}

fn samples(workload: &Workload, outcome: &SimulationResult) -> Vec<Sample> {
    let rows = outcome.rows.iter().zip(workload.requests());
    rows.map(|(row, request)| Sample {
        ttft_s: (!row.rejected).then(|| row.ttft_ns() as f64 / 1e9),
        hit_blocks: row.hit_blocks.into(),
        blocks: request.blocks.into(),
    })
    .collect()
}

/// Draws another trace, the same one for each side and measure.
fn redraw(side: &[Sample], draw: usize, into: &mut Vec<Sample>) {
    into.clear();
    for i in 0..STRETCHES {
        let stretch = mix((draw * STRETCHES + i) as u64 + 1) as usize % STRETCHES;
        let end = |stretch: usize| stretch * side.len() / STRETCHES;
        into.extend_from_slice(&side[end(stretch)..end(stretch + 1)]);
    }
}

fn mean(samples: &mut [Sample]) -> f64 {
    let times = || samples.iter().filter_map(|sample| sample.ttft_s);
    times().sum::<f64>() / times().count().max(1) as f64
}

/// The percentile by nearest rank, without refused requests; sorts the samples.
fn percentile(samples: &mut [Sample], percent: usize) -> f64 {
    let time = |sample: &Sample| sample.ttft_s.unwrap_or(f64::INFINITY);
    let served = samples.iter().filter(|sample| sample.ttft_s.is_some()).count();
    if served == 0 {
        return 0.0;
    }
    let rank = (percent * served).div_ceil(100) - 1;
    let (_, at, _) = samples.select_nth_unstable_by(rank, |a, b| time(a).total_cmp(&time(b)));
    time(at)
}

fn share(samples: &[Sample], fits: fn(&Sample) -> bool) -> f64 {
    let count = samples.iter().filter(|sample| fits(sample)).count();
    100.0 * count as f64 / samples.len().max(1) as f64
}

fn hits(samples: &mut [Sample]) -> f64 {
    let hits: f64 = samples.iter().map(|sample| sample.hit_blocks).sum();
    let blocks: f64 = samples.iter().map(|sample| sample.blocks).sum();
    if blocks > 0.0 { 100.0 * hits / blocks } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use splitrail_sim::cluster::RequestResult;
    use splitrail_sim::cluster::workload::WorkloadBuilder;

    use super::*;

    fn outcome(ttft_ns: impl Fn(u64) -> u64) -> (Workload, SimulationResult) {
        let mut builder = WorkloadBuilder::new(16);
        let rows = (0..1000).map(|i| {
            builder.push(i as f64, 16, 1, &[i]);
            RequestResult {
                arrival_ns: i,
                first_token_ns: i + ttft_ns(i),
                ..RequestResult::default()
            }
        });
        let rows = rows.collect();
        (builder.finish(), SimulationResult { rows, ..SimulationResult::default() })
    }

    #[test]
    fn a_constant_gain_is_significant_and_noise_is_not() {
        let noise = |i: u64| 1_000_000_000 + mix(i) % 4_000_000_000;
        let (workload, first) = outcome(noise);
        let (_, sooner) = outcome(|i| noise(i) - 500_000_000);
        let gain = &compare(&workload, &first, &sooner)[0];
        assert!(gain.matters && (gain.difference + 0.5).abs() < 1e-9, "{gain:?}");
        assert!(gain.high - gain.low < 1e-9, "{gain:?}");
        let (_, other) = outcome(|i| noise(i + 5000));
        let luck = &compare(&workload, &first, &other)[0];
        assert!(!luck.matters && luck.low < 0.0 && luck.high > 0.0, "{luck:?}");
        let text = table(&compare(&workload, &first, &other), "a", "b");
        assert_eq!(text.lines().count(), MEASURES.len() + 1);
    }
}
