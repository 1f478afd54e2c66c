//! Traces of requests: which requests are traced, and where their spans go.
//!
//! The spans of a request are written from its timeline when it has ended, while the timeline is in
//! the processor's caches, and put into a bounded queue. One task sends them: a collector that is
//! slow or gone is felt by no request.

#[cfg(feature = "otlp")]
mod collector;
#[cfg(feature = "otlp")]
mod export;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
mod spans;

use splitrail_config::Config;
use splitrail_ledger::timeline::{RequestTrace, Spans};
use splitrail_telemetry::Metrics;

use crate::identity::ClientTrace;
use crate::summary::Summary;

#[cfg(not(feature = "otlp"))]
use tokio_util::sync::CancellationToken;

#[cfg(feature = "otlp")]
pub use export::Exporter;

/// Decides which requests are traced, and takes them when they have ended.
pub struct Traces {
    #[cfg(feature = "otlp")]
    export: Option<export::Export>,
}

#[cfg(feature = "otlp")]
impl Traces {
    /// Sets the export up that a configuration asks for. Nothing is sent yet.
    ///
    /// # Errors
    /// A secret or a certificate cannot be read.
    pub fn open(config: &Config, metrics: &Metrics) -> Result<Self, String> {
        let Some(otlp) = &config.tracing.otlp else { return Ok(Self { export: None }) };
        let export = export::Export::open(otlp, metrics)?;
        Ok(Self { export: Some(export) })
    }

    /// Begins the trace of a request that arrives now; `None` if it is not traced. A client decides
    /// for its own trace; others are drawn at random.
    pub fn begin(&self, client: &ClientTrace) -> Option<RequestTrace> {
        self.export.as_ref()?.begin(client)
    }

    /// Takes a request that has ended. Its spans are dropped if too many wait already.
    pub fn submit(&self, trace: &RequestTrace, spans: &Spans, summary: &Summary<'_>) {
        if let Some(export) = &self.export {
            export.submit(&spans::EndedTrace { trace, spans, summary });
        }
    }

    /// Takes the exporter for its task; `None` after the first call, and if nothing is exported.
    pub fn take_exporter(&self) -> Option<Exporter> {
        self.export.as_ref()?.take_exporter()
    }
}

/// A build without the feature `otlp` traces nothing; a configuration that asks for it is refused.
#[cfg(not(feature = "otlp"))]
impl Traces {
    /// Nothing is exported.
    ///
    /// # Errors
    /// None.
    pub fn open(_config: &Config, _metrics: &Metrics) -> Result<Self, String> {
        Ok(Self {})
    }

    /// No request is traced.
    pub fn begin(&self, _client: &ClientTrace) -> Option<RequestTrace> {
        None
    }

    /// There is no traced request.
    pub fn submit(&self, _trace: &RequestTrace, _spans: &Spans, _summary: &Summary<'_>) {}

    /// There is no exporter.
    pub fn take_exporter(&self) -> Option<Exporter> {
        None
    }
}

/// The exporter, which this build does not have.
#[cfg(not(feature = "otlp"))]
pub enum Exporter {}

#[cfg(not(feature = "otlp"))]
impl Exporter {
    /// Never runs.
    pub async fn run(self, _stop: CancellationToken) {
        match self {}
    }
}
