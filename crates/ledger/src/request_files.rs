//! The files to which finished requests are written.

use splitrail_telemetry::Metrics;

use super::lines::Lines;
use super::recorder::Recorder;
use splitrail_config::Config;

/// The files to which finished requests are written.
pub struct RequestFiles {
    /// The ledger file, for billing.
    pub ledger: Lines,
    /// The record file, for replay.
    pub recorder: Recorder,
}

impl RequestFiles {
    /// Opens the files that a configuration names.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn open(config: &Config, metrics: &Metrics) -> std::io::Result<Self> {
        let Config { ledger, record, .. } = config;
        let (path, records) = (ledger.path.as_deref(), metrics.ledger_records.clone());
        let writable = &metrics.output_file_writable;
        let ledger = Lines::open("ledger", path, ledger.rotate, records, writable)?;
        let (path, records) = (record.path.as_deref(), metrics.record_lines.clone());
        let lines = Lines::open("record", path, record.rotate, records, writable)?;
        Ok(Self { ledger, recorder: Recorder::new(lines, record) })
    }
}
