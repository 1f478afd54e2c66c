//! The access log: one line for each request of a client.
//!
//! No request waits for it: lines go through a bounded queue to a file or to standard output.

mod line;

use std::error::Error as _;
use std::fs::File;
use std::io;
use std::time::Instant;

use rand::RngExt;
use splitrail_config::model::AccessLogConfig;
use splitrail_ledger::lines::{Lines, Writer};
use splitrail_telemetry::Metrics;
use tonic::{Code, Status};

use crate::identity::Identity;
use crate::summary::Summary;
use splitrail_api::error::Error;
use splitrail_api::name::Name;

/// The configuration's section, and the label of its metric.
const SECTION: &str = "access_log";

/// The outcome of a request that was refused: an extension of the reply, for the access log.
#[derive(Clone, Copy, Debug)]
pub struct RefusalOutcome(pub &'static str);

/// The tenant of a request: an extension of the reply, for the access log.
#[derive(Clone, Debug)]
pub struct TenantName(pub Name);

/// Writes the access log, if it is enabled.
pub struct AccessLog {
    lines: Lines,
}

impl AccessLog {
    /// Opens the configured file, also if the log is off: a reload can switch the log on. Without a
    /// file, the lines go to the standard output of the program, if it gives that.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(
        config: &AccessLogConfig,
        stdout: Option<File>,
        metrics: &Metrics,
    ) -> io::Result<Self> {
        let (path, records) = (config.path.as_deref(), metrics.access_log_lines.clone());
        let writable = &metrics.output_file_writable;
        let lines = match stdout {
            Some(stdout) if path.is_none() => {
                Lines::to_stream(SECTION, ("standard output", stdout), records, writable)
            }
            _ => Lines::open(SECTION, path, config.rotate, records, writable)?,
        };
        Ok(Self { lines })
    }

    /// Takes the writer of the lines for its task; `None` if nothing is written.
    pub fn take_writer(&self) -> Option<Writer> {
        self.lines.take_writer()
    }

    /// Whether a request that ended with `outcome` is logged. One that ended well is drawn at random.
    pub fn takes(&self, config: &AccessLogConfig, outcome: &str) -> bool {
        let AccessLogConfig { enabled, sample_ratio, .. } = *config;
        let is_drawn = || sample_ratio >= 1.0 || rand::rng().random::<f64>() < sample_ratio;
        enabled && self.lines.is_open() && (outcome != "ok" || is_drawn())
    }

    /// Writes the line of a request.
    pub fn write(&self, summary: &Summary<'_>) {
        self.lines.write_line(line::json(summary));
    }

    /// Writes the line of a request that was answered at once, from its reply.
    pub fn answered<B>(
        &self,
        config: &AccessLogConfig,
        identity: &Identity,
        endpoint: &'static str,
        reply: &http::Response<B>,
    ) {
        let status = reply.status();
        let outcome = match reply.extensions().get::<RefusalOutcome>() {
            Some(RefusalOutcome(outcome)) => outcome,
            None if status.is_success() => "ok",
            None => "refused",
        };
        if self.takes(config, outcome) {
            let mut summary = Summary::new(identity, endpoint, Instant::now());
            (summary.status, summary.outcome) = (status.as_u16(), outcome);
            let tenant = reply.extensions().get::<TenantName>();
            summary.tenant = tenant.map(|TenantName(name)| &**name);
            self.write(&summary);
        }
    }

    /// Writes the line of a call over gRPC that was answered at once, with what refused it.
    pub fn called(
        &self,
        config: &AccessLogConfig,
        identity: &Identity,
        endpoint: &'static str,
        refusal: Option<&Status>,
        tenant: Option<&Name>,
    ) {
        let outcome = refusal.map_or("ok", outcome_of);
        if self.takes(config, outcome) {
            let mut summary = Summary::new(identity, endpoint, Instant::now());
            let code = refusal.map_or(Code::Ok, Status::code);
            (summary.status, summary.outcome) = (code as u16, outcome);
            summary.tenant = tenant.map(|name| &**name);
            self.write(&summary);
        }
    }
}

/// The error that a call over gRPC was refused with, if it is one of the router's.
fn error_of(refusal: &Status) -> Option<&Error> {
    refusal.source().and_then(|source| source.downcast_ref::<Error>())
}

/// How a call that was refused ended, for service level objectives: as its error did, if it has one.
/// All other refusals are the client's fault.
pub fn result_of(refusal: &Status) -> &'static str {
    error_of(refusal).map(Error::result).unwrap_or_else(|| match refusal.code() {
        Code::Cancelled | Code::DeadlineExceeded => "cancelled",
        _ => "invalid",
    })
}

/// The outcome of a call that was refused: that of its error, if it has one.
pub fn outcome_of(refusal: &Status) -> &'static str {
    error_of(refusal).map(Error::outcome).unwrap_or_else(|| match refusal.code() {
        Code::Cancelled | Code::DeadlineExceeded => "cancelled",
        Code::PermissionDenied => "permission_denied",
        Code::InvalidArgument => "invalid_request",
        Code::OutOfRange => "body_too_large",
        _ => "refused",
    })
}
