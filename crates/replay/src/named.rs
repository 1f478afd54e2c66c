//! The policies that a replay can be given by name.

use splitrail_policy::Policy;
use splitrail_sim::cluster::Pool;

use crate::published::PublishedPolicy;

/// A policy and its name in reports.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedPolicy {
    /// The name in tables.
    pub name: String,
    /// The policy.
    pub kind: ReplayPolicy,
}

/// The kinds of policies.
#[derive(Clone, Debug, PartialEq)]
pub enum ReplayPolicy {
    /// A policy that others have published.
    Published(PublishedPolicy),
    /// A policy of a configuration.
    Configured(Policy),
    /// A policy of a configuration behind the router's queue.
    Held(Policy),
    /// A reference that knows the future of every queue.
    Oracle {
        /// Whether later requests count.
        look_ahead: bool,
        /// Whether prefixes are fetched from other workers.
        fetch: bool,
    },
    /// A reference with one queue and one cache for all workers.
    Pooled(Pool),
}

/// The policies of this program and references for them, without those that other projects have published.
fn references() -> [(&'static str, ReplayPolicy); 9] {
    let oracle = |look_ahead, fetch| ReplayPolicy::Oracle { look_ahead, fetch };
    [
        ("predicted_ttft", ReplayPolicy::Held(Policy::predicted_ttft())),
        ("predicted_ttft_direct", ReplayPolicy::Configured(Policy::predicted_ttft())),
        ("oracle", oracle(false, false)),
        ("oracle_la", oracle(true, false)),
        ("oracle_fetch", oracle(false, true)),
        ("oracle_fetch_la", oracle(true, true)),
        ("pooled_lru", ReplayPolicy::Pooled(Pool::SharedLru)),
        ("pooled_belady", ReplayPolicy::Pooled(Pool::SharedClairvoyant)),
        ("pooled_sjf", ReplayPolicy::Pooled(Pool::SharedShortestFirst)),
    ]
}

/// The value of `kind` of a policy in a configuration.
pub fn kind_of(policy: &Policy) -> String {
    let value = serde_json::to_value(policy).unwrap_or_default();
    value["kind"].as_str().unwrap_or("policy").to_owned()
}

impl NamedPolicy {
    /// A configured policy.
    pub fn configured(name: impl Into<String>, policy: Policy) -> Self {
        Self { name: name.into(), kind: ReplayPolicy::Configured(policy) }
    }

    /// Parses a policy's name, or a policy as JSON in the form of a configuration (`{"kind":
    /// "kv_overlap", "overlap_weight": 2}`).
    ///
    /// A name that a published and a configurable policy share means the published one, which takes
    /// the first of equal candidates.
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

    /// The policy with this name: a published one, a configurable one with or without its queue, or
    /// a reference.
    pub fn by_name(name: &str) -> Option<Self> {
        let reference = references().into_iter().find(|(known, _)| *known == name);
        let kind = match reference {
            Some((_, kind)) => kind,
            None => ReplayPolicy::Published(PublishedPolicy::named(name)?),
        };
        Some(Self { name: name.to_owned(), kind })
    }

    /// A configured policy under the name of its kind, with or without the router's queue.
    pub fn of(policy: Policy, held: bool) -> Self {
        let name = kind_of(&policy);
        let kind = if held { ReplayPolicy::Held(policy) } else { ReplayPolicy::Configured(policy) };
        Self { name, kind }
    }

    /// All names that [`by_name`](Self::by_name) accepts.
    pub fn names() -> Vec<&'static str> {
        let published = PublishedPolicy::ALL.into_iter().map(|(name, _)| name);
        published.chain(references().map(|(name, _)| name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_and_configured_policies_are_distinguished() {
        for name in NamedPolicy::names() {
            assert_eq!(NamedPolicy::parse(name).map(|named| named.name).as_deref(), Some(name));
        }
        let configured = NamedPolicy::parse("kv_overlap").expect("a policy of the configuration");
        assert_eq!(configured.name, "kv_overlap");
        assert!(matches!(configured.kind, ReplayPolicy::Configured(Policy::KvOverlap { .. })));
        assert_eq!(
            NamedPolicy::parse("{\"kind\": \"round_robin\"}"),
            Some(NamedPolicy::of(Policy::RoundRobin {}, false))
        );
        assert_eq!((NamedPolicy::parse("best"), NamedPolicy::parse("{\"kind\": 1}")), (None, None));
    }
}
