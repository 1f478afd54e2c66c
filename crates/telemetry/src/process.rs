//! The metrics of the process, by the names that all Prometheus clients use: `process_*`.

use prometheus::proto::MetricFamily;

/// Processor time, memory, open files and threads of this process. Empty if `/proc` cannot be read.
#[cfg(target_os = "linux")]
pub(crate) fn families() -> Vec<MetricFamily> {
    use prometheus::core::Collector;
    use prometheus::process_collector::ProcessCollector;
    ProcessCollector::for_self().collect()
}

/// Nothing is known of processes on other systems.
#[cfg(not(target_os = "linux"))]
pub(crate) fn families() -> Vec<MetricFamily> {
    Vec::new()
}
