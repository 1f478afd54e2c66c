//! Reads clocks, processor time and resident memory, and computes percentiles.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Processor time of all threads of this process so far.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Median time between two readings of the clock with nothing between them, in nanoseconds. It is
/// subtracted from the times of single calls.
pub fn timer_overhead_ns() -> u64 {
    let mut samples: Vec<u64> = (0..20_000)
        .map(|_| {
            let start = Instant::now();
            black_box(());
            start.elapsed().as_nanos() as u64
        })
        .collect();
    Percentiles::of(&mut samples).p50 as u64
}

/// Percentiles of a set of samples, in their unit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Computes percentiles by nearest rank, and sorts the samples. They are 0 if there are no
    /// samples.
    pub fn of(samples: &mut [u64]) -> Self {
        samples.sort_unstable();
        let rank = |share: f64| {
            let at = (samples.len() as f64 * share).ceil() as usize;
            samples.get(at.max(1) - 1).copied().unwrap_or_default() as f64
        };
        Self { p50: rank(0.50), p99: rank(0.99) }
    }
}

/// The median of some figures: the mean of the middle two if their number is even, and NaN if there
/// are none.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[half],
        _ => (sorted[half - 1] + sorted[half]) / 2.0,
    }
}

/// Resident memory of this process in bytes; 0 if `/proc` cannot be read.
pub fn resident_bytes() -> u64 {
    let kib = |text: String| {
        let line = text.lines().find(|line| line.starts_with("VmRSS:"))?.to_owned();
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    fs::read_to_string("/proc/self/status").ok().and_then(kib).unwrap_or_default() * 1024
}

/// Time for which the calling thread has been ready to run but had no processor, in nanoseconds.
/// This part of a stall is caused by other threads and not by the index. It is 0 if `/proc` cannot
/// be read.
pub fn run_queue_wait_ns() -> u64 {
    fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse().ok())
        .unwrap_or_default()
}

/// The duration of a piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Wall time.
    pub wall: Duration,
    /// Processor time of the process.
    pub cpu: Duration,
}

/// Runs a piece of work and measures its duration.
pub fn span(work: impl FnOnce()) -> Span {
    let cpu = cpu_time();
    let start = Instant::now();
    work();
    let wall = start.elapsed();
    Span { wall, cpu: cpu_time() - cpu }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut samples: Vec<u64> = (1..=200).rev().collect();
        let found = Percentiles::of(&mut samples);
        assert_eq!((found.p50, found.p99), (100.0, 198.0));
        assert_eq!(Percentiles::of(&mut []).p99, 0.0);
    }

    #[test]
    fn median_of_even_counts_is_between() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
