//! The files to which finished requests are written.

use splitrail_telemetry::Metrics;

use super::lines::Lines;
use super::recorder::Recorder;
use splitrail_config::Config;

/// The files to which ended requests are written.
pub struct Books {
    /// For billing.
    pub ledger: Lines,
    /// For replay.
    pub recorder: Recorder,
}

impl Books {
    /// Opens what a configuration names.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(config: &Config, metrics: &Metrics) -> std::io::Result<Self> {
        let Config { ledger, record, .. } = config;
        let file = (ledger.path.as_deref(), ledger.rotate);
        let records = Lines::open("ledger", file, metrics.ledger_records.clone())?;
        let file = (record.path.as_deref(), record.rotate);
        let lines = Lines::open("record", file, metrics.record_lines.clone())?;
        Ok(Self { ledger: records, recorder: Recorder::new(lines, record) })
    }
}
