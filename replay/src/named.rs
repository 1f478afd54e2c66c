//! Policies by name.

use splitrail_pick::{Policy, Published};
use splitrail_sim::cluster::Pool;

/// What places requests, under the name that a report has.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// In tables.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// What can place requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A policy that others have published.
    Published(Published),
    /// A policy of a configuration.
    Configured(Policy),
    /// A reference that knows what every queue is going to do.
    Oracle {
        /// Whether what comes after counts.
        look_ahead: bool,
        /// Whether prefixes are fetched from other workers.
        fetch: bool,
    },
    /// A reference with one queue and one cache for all.
    Pooled(Pool),
}

impl Named {
    /// A configured policy.
    pub fn configured(name: impl Into<String>, policy: Policy) -> Self {
        Self { name: name.into(), kind: Kind::Configured(policy) }
    }

    /// A published policy or a reference, by its name.
    pub fn by_name(name: &str) -> Option<Self> {
        let oracle = |look_ahead, fetch| Kind::Oracle { look_ahead, fetch };
        let kind = match name {
            "oracle" => oracle(false, false),
            "oracle_la" => oracle(true, false),
            "oracle_fetch" => oracle(false, true),
            "oracle_fetch_la" => oracle(true, true),
            "pooled_lru" => Kind::Pooled(Pool::SharedLru),
            "pooled_belady" => Kind::Pooled(Pool::SharedClairvoyant),
            "pooled_sjf" => Kind::Pooled(Pool::SharedShortestFirst),
            _ => Kind::Published(Published::named(name)?),
        };
        Some(Self { name: name.to_owned(), kind })
    }

    /// All names that [`by_name`](Self::by_name) knows.
    pub fn names() -> Vec<&'static str> {
        let references = [
            "oracle",
            "oracle_la",
            "oracle_fetch",
            "oracle_fetch_la",
            "pooled_lru",
            "pooled_belady",
            "pooled_sjf",
        ];
        Published::ALL.iter().map(|policy| policy.name()).chain(references).collect()
    }
}
