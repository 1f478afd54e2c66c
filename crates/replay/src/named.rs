//! Policies by name.

use splitrail_policy::{Policy, Published};
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
    /// The same behind the router's queue.
    Held(Policy),
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

/// The word that names a policy in a configuration.
fn kind_of(policy: &Policy) -> String {
    let value = serde_json::to_value(policy).unwrap_or_default();
    value["kind"].as_str().unwrap_or("policy").to_owned()
}

impl Named {
    /// A configured policy.
    pub fn configured(name: impl Into<String>, policy: Policy) -> Self {
        Self { name: name.into(), kind: Kind::Configured(policy) }
    }

    /// A policy by its name, or by what a configuration would say of it, as JSON
    /// (`{"kind": "kv_overlap", "overlap_weight": 2}`).
    ///
    /// A name that a published policy and a configurable one share means the published one,
    /// which takes the first of equals.
    pub fn parse(text: &str) -> Option<Self> {
        let configured = |value| {
            let policy: Policy = serde_json::from_value(value).ok()?;
            let held = matches!(policy, Policy::PredictedTtft { .. });
            Some(Self::of(policy, held))
        };
        if text.starts_with('{') {
            return configured(serde_json::from_str(text).ok()?);
        }
        Self::by_name(text).or_else(|| configured(serde_json::json!({ "kind": text })))
    }

    /// A published policy, ours with its queue or without, or a reference, by its name.
    pub fn by_name(name: &str) -> Option<Self> {
        let oracle = |look_ahead, fetch| Kind::Oracle { look_ahead, fetch };
        let kind = match name {
            "oracle" => oracle(false, false),
            "oracle_la" => oracle(true, false),
            "oracle_fetch" => oracle(false, true),
            "oracle_fetch_la" => oracle(true, true),
            "predicted_ttft" => Kind::Held(Policy::predicted_ttft()),
            "predicted_ttft_direct" => Kind::Configured(Policy::predicted_ttft()),
            "pooled_lru" => Kind::Pooled(Pool::SharedLru),
            "pooled_belady" => Kind::Pooled(Pool::SharedClairvoyant),
            "pooled_sjf" => Kind::Pooled(Pool::SharedShortestFirst),
            _ => Kind::Published(Published::named(name)?),
        };
        Some(Self { name: name.to_owned(), kind })
    }

    /// The policy of a configuration under the name that stands there, with the router's
    /// queue before it or without.
    pub fn of(policy: Policy, held: bool) -> Self {
        let name = kind_of(&policy);
        let kind = if held { Kind::Held(policy) } else { Kind::Configured(policy) };
        Self { name, kind }
    }

    /// All names that [`by_name`](Self::by_name) knows.
    pub fn names() -> Vec<&'static str> {
        let references = [
            "predicted_ttft",
            "predicted_ttft_direct",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_configured_policies_are_told_apart() {
        for name in Named::names() {
            assert_eq!(Named::parse(name).map(|named| named.name).as_deref(), Some(name));
        }
        let configured = Named::parse("kv_overlap").expect("a policy of the configuration");
        assert_eq!(configured.name, "kv_overlap");
        assert!(matches!(configured.kind, Kind::Configured(Policy::KvOverlap { .. })));
        assert_eq!(
            Named::parse("{\"kind\": \"random\"}"),
            Some(Named::of(Policy::Random {}, false))
        );
        assert_eq!((Named::parse("best"), Named::parse("{\"kind\": 1}")), (None, None));
    }
}
