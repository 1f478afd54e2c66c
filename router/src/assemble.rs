//! Builds the core from a validated configuration.

use std::fs::File;
use std::sync::Arc;

use splitrail_access::{Access, AccessError};
use splitrail_config::Config;
use splitrail_fleet::ServedModels;
use splitrail_fleet::models::{ModelError, SharedParts, models};
use splitrail_ledger::lines::Lines;
use splitrail_ledger::recorder::Recorder;
use splitrail_telemetry::Metrics;

use crate::core::{Core, RequestLogs};
use splitrail_ledger::audit::Audit;
use splitrail_request_log::access_log::AccessLog;
use splitrail_request_log::traces::Traces;

/// Why a configuration that is valid by itself cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A model's credential, tokenizer or chat template cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The keys of clients cannot be loaded.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The exporter of traces cannot be set up.
    #[error("tracing.otlp: {0}")]
    Traces(String),
    /// The ledger file, the record file, the audit file or the access log cannot be written.
    #[error("{0}")]
    File(std::io::Error),
    /// A defect of the router.
    #[error("{0}")]
    Defect(String),
}

/// Builds everything that serves a configuration; nothing is bound yet. An access log without a file
/// goes to `stdout`, if the program gives it its standard output.
///
/// # Errors
/// An external resource is not available: a credential, a tokenizer, the ledger file.
pub fn assemble(config: Config, stdout: Option<File>) -> Result<Arc<Core>, AssembleError> {
    let config = Arc::new(config);
    let metrics = Metrics::new().map_err(|error| AssembleError::Defect(error.to_string()))?;
    let memory = Arc::default();
    let models = models(&config, SharedParts { memory: &memory, metrics: &metrics }, None)?;
    let access = Access::new(&config, &metrics, None)?;
    let (path, records) = (config.ledger.path.as_deref(), metrics.ledger_records.clone());
    let (rotate, writable) = (config.ledger.rotate, &metrics.output_file_writable);
    let ledger = Lines::open("ledger", path, rotate, records, writable);
    let ledger = ledger.map_err(AssembleError::File)?;
    let recorder = Recorder::open(&config.record, &metrics).map_err(AssembleError::File)?;
    let audit = Audit::open(&config.audit, &metrics).map_err(AssembleError::File)?;
    let access_log = AccessLog::open(&config.access_log, stdout, &metrics);
    let access_log = access_log.map_err(AssembleError::File)?;
    let traces = Traces::open(&config, &metrics).map_err(AssembleError::Traces)?;
    let logs = RequestLogs { ledger, recorder, audit, access_log, traces };
    Ok(Arc::new(Core::new(models, config, metrics, memory, access, logs)))
}

/// Builds what serves a configuration in place of another one. Everything that stays the same is
/// taken over: indexes, bookings, connections, tokenizers. The current state is not changed.
///
/// # Errors
/// A model's credential, tokenizer or chat template cannot be loaded.
pub fn reassemble(
    config: Config,
    core: &Core,
    before: &ServedModels,
) -> Result<ServedModels, ModelError> {
    let config = Arc::new(config);
    let shared = SharedParts { memory: &core.memory, metrics: &core.metrics };
    let models = models(&config, shared, Some(before))?;
    Ok(ServedModels::new(models, config))
}
