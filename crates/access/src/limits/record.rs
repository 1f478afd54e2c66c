//! The record of a tenant's shares, which all replicas read and change by compare-and-set.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::kind::{LimitKind, PerLimit};

/// Maximum number of replicas in a record.
pub(crate) const REPLICAS_MAX: usize = 256;

/// Maximum size of a record in bytes.
pub(crate) const RECORD_MAX_BYTES: usize = 256 << 10;

/// The version of the format.
const VERSION: u32 = 1;

/// The shares of all replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    /// Whether replicas may take what no share contains. A record that was just created is closed, so
    /// that replicas that had a share in a lost record can add it first.
    pub(crate) is_open: bool,
    pub(crate) replicas: BTreeMap<String, Entry>,
}

/// The shares of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Number of times that the replica has written the entry. Other replicas measure the lease from
    /// when they first see a number, so that their clocks need not agree.
    pub(crate) renewal: u64,
    /// The replica's time of the last renewal, in milliseconds since 1970.
    pub(crate) renewed_ms: u64,
    /// Whether the replica has ended and admits nothing any more.
    #[serde(default)]
    pub(crate) has_left: bool,
    #[serde(default)]
    requests: Option<Holding>,
    #[serde(default)]
    tokens_per_minute: Option<Holding>,
    #[serde(default)]
    tokens_per_day: Option<Holding>,
}

/// A replica's share of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holding {
    /// The limit in the replica's configuration.
    pub(crate) limit: u64,
    /// Maximum that the replica may have used in any window.
    pub(crate) share: u64,
    /// What the replica had used in its window.
    pub(crate) used: u64,
    /// The share that the replica needs.
    pub(crate) need: u64,
}

impl Default for Record {
    fn default() -> Self {
        Self { version: VERSION, is_open: false, replicas: BTreeMap::new() }
    }
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// The bytes are not a record of this version, or the record is larger than any that a replica
    /// writes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, UnreadableRecord> {
        if bytes.len() > RECORD_MAX_BYTES {
            return Err(UnreadableRecord);
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|_| UnreadableRecord)?;
        let is_usable = record.version == VERSION && record.replicas.len() <= REPLICAS_MAX;
        is_usable.then_some(record).ok_or(UnreadableRecord)
    }

    /// The record as bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        // A map with text keys and numbers can always be written.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The sum of all shares of a limit.
    #[cfg(test)]
    pub(crate) fn total(&self, kind: LimitKind) -> u64 {
        let shares = self.replicas.values().filter_map(|entry| entry.holding(kind));
        shares.fold(0, |sum, holding| sum.saturating_add(holding.share))
    }
}

impl Entry {
    /// An entry with these shares.
    pub(crate) fn new(renewal: u64, renewed_ms: u64, of: &PerLimit<Option<Holding>>) -> Self {
        Self {
            renewal,
            renewed_ms,
            has_left: false,
            requests: of[LimitKind::Requests],
            tokens_per_minute: of[LimitKind::TokensPerMinute],
            tokens_per_day: of[LimitKind::TokensPerDay],
        }
    }

    /// The share of a limit.
    pub(crate) fn holding(&self, kind: LimitKind) -> Option<&Holding> {
        match kind {
            LimitKind::Requests => self.requests.as_ref(),
            LimitKind::TokensPerMinute => self.tokens_per_minute.as_ref(),
            LimitKind::TokensPerDay => self.tokens_per_day.as_ref(),
        }
    }

    /// The share of a limit, to change it.
    pub(crate) fn holding_mut(&mut self, kind: LimitKind) -> Option<&mut Holding> {
        match kind {
            LimitKind::Requests => self.requests.as_mut(),
            LimitKind::TokensPerMinute => self.tokens_per_minute.as_mut(),
            LimitKind::TokensPerDay => self.tokens_per_day.as_mut(),
        }
    }
}

/// A record that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("not a record of shares of this version")]
pub(crate) struct UnreadableRecord;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_and_anything_else_is_refused() {
        let holding = Some(Holding { limit: 9, share: 3, used: 2, need: 4 });
        let entry = Entry::new(7, 11, &PerLimit::from_fn(|_| holding));
        let replicas = BTreeMap::from([("r0".to_owned(), entry)]);
        let record = Record { is_open: true, replicas, ..Record::default() };
        assert_eq!(Record::decode(&record.encode()).unwrap(), record);
        let largest = Record {
            replicas: (0..REPLICAS_MAX)
                .map(|id| {
                    let holding = Some(Holding {
                        limit: u64::MAX,
                        share: u64::MAX,
                        used: u64::MAX,
                        need: u64::MAX,
                    });
                    (
                        format!("{id:0>64}"),
                        Entry::new(u64::MAX, u64::MAX, &PerLimit::from_fn(|_| holding)),
                    )
                })
                .collect(),
            ..Record::default()
        };
        assert_eq!(Record::decode(&largest.encode()).unwrap(), largest);
        for bytes in [&b""[..], b"{}", b"[]", &[b' '; RECORD_MAX_BYTES + 1]] {
            assert!(Record::decode(bytes).is_err());
        }
        let later = Record { version: VERSION + 1, ..Record::default() };
        assert!(Record::decode(&later.encode()).is_err());
    }
}
