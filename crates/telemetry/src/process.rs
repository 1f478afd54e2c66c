//! The metrics of the process, by the names that all Prometheus clients use: `process_*`. The
//! collector of `prometheus` counts whole seconds of processor time, which is too coarse for a rate
//! over a minute.

use std::fs;

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge};

/// Ticks a second in `/proc/self/stat` (proc(5)): `sysconf(_SC_CLK_TCK)`, which is 100 on every
/// architecture that Rust has a Linux standard library for.
const TICKS_PER_SECOND: f64 = 100.0;

/// The families of the process. Those that `/proc` does not tell are left out.
pub(crate) fn families() -> Vec<MetricFamily> {
    let read = |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let (stat, status, limits) = (read("stat"), read("status"), read("limits"));
    // The name of the program is in parentheses and may contain anything.
    let stat: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let field = |at: usize| stat.get(at)?.parse::<f64>().ok();
    let kib = |key: &str| Some(number(&status, key)? * 1024.0);
    let cpu = field(11).zip(field(12)).map(|(user, system)| (user + system) / TICKS_PER_SECOND);
    let open = fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64);
    let started = field(19).zip(boot_time()).map(|(ticks, boot)| boot + ticks / TICKS_PER_SECOND);
    let gauges = [
        ("process_open_fds", "Number of open file descriptors.", open),
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            number(&limits, "Max open files"),
        ),
        ("process_virtual_memory_bytes", "Virtual memory size in bytes.", kib("VmSize:")),
        ("process_resident_memory_bytes", "Resident memory size in bytes.", kib("VmRSS:")),
        (
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            started,
        ),
        ("process_threads", "Number of OS threads in the process.", number(&status, "Threads:")),
    ];
    let mut families = cpu.and_then(cpu_seconds).unwrap_or_default();
    for (name, help, value) in gauges {
        if let (Some(value), Ok(gauge)) = (value, Gauge::new(name, help)) {
            gauge.set(value);
            families.extend(gauge.collect());
        }
    }
    families
}

fn cpu_seconds(seconds: f64) -> Option<Vec<MetricFamily>> {
    let help = "Total user and system CPU time spent in seconds.";
    let counter = Counter::new("process_cpu_seconds_total", help).ok()?;
    counter.inc_by(seconds);
    Some(counter.collect())
}

/// The first number after `key` in a file of lines; `unlimited` is no number.
fn number(text: &str, key: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

/// When the system started, in seconds since 1970.
fn boot_time() -> Option<f64> {
    number(&fs::read_to_string("/proc/stat").ok()?, "btime ")
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::clock::unix_ms;

    #[test]
    fn the_figures_of_this_process_are_plausible() {
        let families = families();
        let value = |name: &str| {
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let metric = &family.get_metric()[0];
            metric.get_counter().get_value().max(metric.get_gauge().get_value())
        };
        assert_eq!(families.len(), 7);
        let (resident, whole) =
            (value("process_resident_memory_bytes"), value("process_virtual_memory_bytes"));
        assert!(resident > 1e5 && resident <= whole, "{resident} of {whole}");
        assert!(value("process_open_fds") >= 3.0 && value("process_threads") >= 1.0);
        assert!(value("process_open_fds") < value("process_max_fds"));
        let age = unix_ms() as f64 / 1e3 - value("process_start_time_seconds");
        assert!((-2.0..3600.0).contains(&age), "{age}");
        // No more processor time than on all processors since the start.
        let cpu = value("process_cpu_seconds_total");
        let processors = std::thread::available_parallelism().unwrap().get() as f64;
        assert!(cpu <= (age + 2.0) * processors, "{cpu}");
    }
}
