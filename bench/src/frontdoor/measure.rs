//! Measures one target under one load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::Failure;
use super::client::{self, Framing, Load};
use super::targets::Target;
use crate::fleet::process::{cpu_of, cpu_of_all, cpu_parts_of};

/// Time before the measurement, in which connections are opened.
const WARM_UP: Duration = Duration::from_millis(250);
/// Time for which clients go on after the measurement, so that all of them are busy until its end.
const OVERTIME: Duration = Duration::from_millis(60);

/// The figures of a target under one load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    /// Number of replies per second.
    pub(super) per_s: f64,
    /// Median of the latency in milliseconds.
    pub(super) p50_ms: f64,
    /// 99th percentile of the latency in milliseconds.
    pub(super) p99_ms: f64,
    /// Processor time of the target per reply in microseconds; 0 if the target has no process.
    pub(super) cpu_us: f64,
    /// The part of `cpu_us` that was spent in the kernel.
    pub(super) system_us: f64,
    /// Processor time of other processes than the target, the engines and the clients, in percent
    /// of the time of all processors.
    pub(super) foreign_percent: f64,
    /// Requests with the wrong prefill worker in percent.
    pub(super) misplaced_percent: f64,
}

impl Figures {
    /// The median of each figure over the rounds.
    pub(super) fn median(rounds: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(figure).collect();
            all.sort_by(f64::total_cmp);
            let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
            low.midpoint(high)
        };
        Self {
            per_s: of(|f| f.per_s),
            p50_ms: of(|f| f.p50_ms),
            p99_ms: of(|f| f.p99_ms),
            cpu_us: of(|f| f.cpu_us),
            system_us: of(|f| f.system_us),
            foreign_percent: of(|f| f.foreign_percent),
            misplaced_percent: of(|f| f.misplaced_percent),
        }
    }
}

/// Processor times at one instant.
struct Clocks {
    at: Instant,
    target: Duration,
    /// The part of `target` that was spent in the kernel.
    system: Duration,
    /// This process, with the clients and the engines.
    own: Duration,
    /// All processes of the machine.
    all: Duration,
}

impl Clocks {
    fn read(processes: &[u32]) -> Result<Self, Failure> {
        let (mut target, mut system) = (Duration::ZERO, Duration::ZERO);
        for id in processes {
            let (as_user, in_system) = cpu_parts_of(&id.to_string())?;
            target += as_user + in_system;
            system += in_system;
        }
        Ok(Self { at: Instant::now(), target, system, own: cpu_of("self")?, all: cpu_of_all()? })
    }
}

/// Measures a target for the time `round_time`.
///
/// # Errors
/// A request gets no reply or another status than 200, or the target's process has ended.
pub(super) async fn measure(
    target: &Target,
    load: &Arc<Load>,
    (clients, streams): (usize, bool),
    round_time: Duration,
) -> Result<Figures, Failure> {
    let processes = target.process.as_ref().map_or(Ok(Vec::new()), |process| process.ids())?;
    let from = Instant::now() + WARM_UP;
    let end = from + round_time;
    let address = match load.framing {
        Framing::Http1 | Framing::Http2 if streams => target.streams,
        Framing::Http1 | Framing::Http2 => target.whole,
        Framing::Grpc | Framing::GrpcShared => {
            target.grpc.ok_or("the target has no address for gRPC")?
        }
    };
    let running = client::run(target, address, load, clients, end + OVERTIME);
    let watching = async {
        sleep_until(from.into()).await;
        let before = Clocks::read(&processes)?;
        sleep_until(end.into()).await;
        Ok::<_, Failure>((before, Clocks::read(&processes)?))
    };
    let (results, clocks) = tokio::join!(running, watching);
    let (results, (before, after)) = (results?, clocks?);
    let total = results.latencies.len();
    let counted = results.latencies.iter().filter(|(at, _)| (before.at..after.at).contains(at));
    let mut latencies: Vec<u64> = counted.map(|(_, latency)| *latency).collect();
    if latencies.is_empty() {
        return Err(format!("{}: no reply in {round_time:?}", target.name).into());
    }
    latencies.sort_unstable();
    let count = latencies.len();
    let ms = |share: f64| latencies[((count - 1) as f64 * share) as usize] as f64 / 1e6;
    let wall = (after.at - before.at).as_secs_f64();
    let cpu = after.target.saturating_sub(before.target);
    let system = after.system.saturating_sub(before.system);
    let own = after.own.saturating_sub(before.own);
    let foreign = after.all.saturating_sub(before.all).saturating_sub(cpu + own);
    let cores = std::thread::available_parallelism()?.get() as f64;
    Ok(Figures {
        per_s: count as f64 / wall,
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        cpu_us: cpu.as_secs_f64() * 1e6 / count as f64,
        system_us: system.as_secs_f64() * 1e6 / count as f64,
        foreign_percent: foreign.as_secs_f64() / (wall * cores) * 100.0,
        misplaced_percent: results.misplaced as f64 / total as f64 * 100.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_of_each_figure_alone() {
        let round = |per_s, cpu_us| Figures { per_s, cpu_us, ..Figures::default() };
        let median = Figures::median(&[round(1.0, 9.0), round(3.0, 7.0), round(2.0, 8.0)]);
        assert_eq!((median.per_s, median.cpu_us), (2.0, 8.0));
        let of_two = Figures::median(&[round(1.0, 9.0), round(3.0, 7.0)]);
        assert_eq!((of_two.per_s, of_two.cpu_us), (2.0, 8.0));
    }
}
