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

/// Maximum number of lines in a second about refused requests of one origin. The next line about
/// that origin says how many were left out.
const REFUSALS_PER_SECOND: u32 = 10;
/// Maximum number of origins that are counted apart. Operators beyond it are counted together.
const ORIGINS_MAX: usize = 1024;
/// Maximum number of characters of a path.
const PATH_MAX_CHARS: usize = 256;

/// Writes the audit file, if one is configured.
pub struct Audit {
    lines: Lines,
    /// By origin, so that refusals of one do not keep those of another out of the file.
    refusals: Mutex<BTreeMap<Origin, Refusals>>,
}

/// Where refused requests come from.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Origin {
    listener: &'static str,
    /// The id of the operator's key; `None` for requests without a valid credential.
    key: Option<String>,
}

/// The listener on which changes are made.
const ADMIN: &str = "admin";

/// The lines about refused requests of an origin in the current second.
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
        let (records, writable) = (metrics.audit_records.clone(), &metrics.output_file_writable);
        let lines = Lines::open("audit", config.path.as_deref(), config.rotate, records, writable)?;
        Ok(Self { lines, refusals: Mutex::default() })
    }

    /// Takes the writer of the file for its task; `None` without a file.
    pub fn take_writer(&self) -> Option<Writer> {
        self.lines.take_writer()
    }

    /// Records a request to change something. Of refused ones, only some are recorded.
    pub fn change(&self, mut change: Change<'_>) {
        let end = change.path.char_indices().nth(PATH_MAX_CHARS).map(|(end, _)| end);
        change.path = &change.path[..end.unwrap_or(change.path.len())];
        if !matches!(change.status, 401 | 403) {
            self.write("change", change);
        } else if let Some(left_out) = self.may_write_refusal(ADMIN, change.key) {
            self.write("change", RefusedChange { change, listener: ADMIN, left_out });
        }
    }

    /// Records a reload of the configuration: `changed`, `unchanged` or `refused`.
    pub fn reload(&self, result: &str, changes: usize) {
        self.write("reload", Reloaded { result, changes });
    }

    /// Records a refused credential, unless there were many at this listener in this second.
    pub fn refused(&self, listener: &'static str, address: IpAddr, reason: &'static str) {
        let Some(left_out) = self.may_write_refusal(listener, None) else { return };
        let address = address.to_canonical();
        self.write("refused_credential", RefusedCredential { listener, address, reason, left_out });
    }

    /// Counts a refusal at a listener, of the operator with this key. If it may be written, the number
    /// of those of the same origin that were left out before it.
    fn may_write_refusal(&self, listener: &'static str, key: Option<&str>) -> Option<u64> {
        if !self.lines.is_open() {
            return None;
        }
        let mut origins = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let second = unix_ms() / 1000;
        let mut origin = Origin { listener, key: key.map(str::to_owned) };
        if origins.len() >= ORIGINS_MAX && !origins.contains_key(&origin) {
            origins.retain(|_, refusals| refusals.second == second || refusals.left_out > 0);
            if origins.len() >= ORIGINS_MAX {
                origin.key = None;
            }
        }
        let refusals = origins.entry(origin).or_default();
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_lines_of_its_own_and_the_number_of_counted_keys_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = Some(folder.path().join("audit.jsonl"));
        let config = AuditConfig { path, ..AuditConfig::default() };
        let audit = Audit::open(&config, &Metrics::new().unwrap()).unwrap();
        let (began, mut written) = (unix_ms() / 1000, 0);
        for _ in 0..1000 {
            written += u64::from(audit.may_write_refusal(ADMIN, Some("noisy")).is_some());
        }
        let seconds = unix_ms() / 1000 - began + 1;
        assert!(written <= seconds * u64::from(REFUSALS_PER_SECOND), "{written} in {seconds} s");
        assert_eq!(audit.may_write_refusal(ADMIN, Some("other")), Some(0));
        assert_eq!(audit.may_write_refusal(ADMIN, None), Some(0));
        for number in 0..5 * ORIGINS_MAX {
            let _is_written = audit.may_write_refusal(ADMIN, Some(&number.to_string()));
        }
        let counted = audit.refusals.lock().unwrap().len();
        assert!(counted <= ORIGINS_MAX + 1, "{counted} origins");
    }
}
