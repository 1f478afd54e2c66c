//! The audit file: who changed what on the admin listener, reloads, and refused credentials.
//!
//! Lines have names and addresses, and never a credential.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use crate::lines::{Lines, Writer};
use serde::Serialize;
use splitrail_config::model::AuditConfig;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::clock::unix_ms;

/// Maximum number of lines in a second about requests of a listener without a role that were
/// refused. The next line about that listener says how many were left out.
const REFUSALS_PER_SECOND: u32 = 10;
/// Maximum number of characters of a path.
const PATH_MAX_CHARS: usize = 256;

/// Writes the audit file, if one is configured.
pub struct Audit {
    lines: Lines,
    /// By listener, so that clients of one do not keep refusals at another out of the file.
    refusals: Mutex<BTreeMap<&'static str, Refusals>>,
}

/// The listener on which changes are made.
const ADMIN: &str = "admin";

/// The lines about refused requests of a listener in the current second.
#[derive(Default)]
struct Refusals {
    second: u64,
    written: u32,
    left_out: u64,
}

/// A change that was made or refused on the admin listener.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Change<'a> {
    /// The id of the operator's key; `None` for a request without a credential.
    pub key: Option<&'a str>,
    /// The role of the operator; `None` for a request without a credential.
    pub role: Option<&'static str>,
    /// The address of the client.
    pub address: IpAddr,
    /// The method of the request.
    pub method: &'a str,
    /// The path of the request.
    pub path: &'a str,
    /// The status of the reply.
    pub status: u16,
    /// The id of the request, if the client sent one.
    pub request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct Line<'a, T> {
    version: u32,
    unix_ms: u64,
    event: &'a str,
    #[serde(flatten)]
    facts: T,
}

#[derive(Serialize)]
struct RefusedChange<'a> {
    #[serde(flatten)]
    change: Change<'a>,
    listener: &'static str,
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[derive(Serialize)]
struct RefusedCredential {
    listener: &'static str,
    address: IpAddr,
    reason: &'static str,
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[derive(Serialize)]
struct Reloaded<'a> {
    result: &'a str,
    changes: usize,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Audit {
    /// Opens the configured file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(config: &AuditConfig, metrics: &Metrics) -> io::Result<Self> {
        let records = metrics.audit_records.clone();
        let lines = Lines::open("audit", config.path.as_deref(), config.rotate, records)?;
        Ok(Self { lines, refusals: Mutex::default() })
    }

    /// Takes the writer of the file for its task; `None` without a file.
    pub fn take_writer(&self) -> Option<Writer> {
        self.lines.take_writer()
    }

    /// Records a request to change something. Of refused ones without a role, only some are
    /// recorded.
    pub fn change(&self, mut change: Change<'_>) {
        let end = change.path.char_indices().nth(PATH_MAX_CHARS).map(|(end, _)| end);
        change.path = &change.path[..end.unwrap_or(change.path.len())];
        if change.role.is_some() || !matches!(change.status, 401 | 403) {
            self.write("change", change);
        } else if let Some(left_out) = self.may_write_refusal(ADMIN) {
            self.write("change", RefusedChange { change, listener: ADMIN, left_out });
        }
    }

    /// Records a reload of the configuration: `changed`, `unchanged` or `refused`.
    pub fn reload(&self, result: &str, changes: usize) {
        self.write("reload", Reloaded { result, changes });
    }

    /// Records a refused credential, unless there were many at this listener in this second.
    pub fn refused(&self, listener: &'static str, address: IpAddr, reason: &'static str) {
        let Some(left_out) = self.may_write_refusal(listener) else { return };
        let address = address.to_canonical();
        self.write("refused_credential", RefusedCredential { listener, address, reason, left_out });
    }

    /// Counts a refusal at a listener. If it may be written, the number of those that were left out
    /// before it.
    fn may_write_refusal(&self, listener: &'static str) -> Option<u64> {
        if !self.lines.is_open() {
            return None;
        }
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let refusals = refusals.entry(listener).or_default();
        let second = unix_ms() / 1000;
        if refusals.second != second {
            (refusals.second, refusals.written) = (second, 0);
        }
        if refusals.written >= REFUSALS_PER_SECOND {
            refusals.left_out += 1;
            return None;
        }
        refusals.written += 1;
        Some(std::mem::take(&mut refusals.left_out))
    }

    fn write(&self, event: &str, facts: impl Serialize) {
        self.lines.write(&Line { version: 1, unix_ms: unix_ms(), event, facts });
    }
}
