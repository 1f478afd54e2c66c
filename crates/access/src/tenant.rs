//! A tenant, as requests see it.

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::Arc;

use rustc_hash::FxHasher;
use splitrail_api::error::{Error, ErrorKind, LimitReached};
use splitrail_api::name::Name;
use splitrail_api::shares::ClientShare;
use splitrail_config::model::{CacheGroup, TenantConfig, TenantLimits};
use splitrail_telemetry::{Metrics, TenantSeries};

use crate::limits::{
    LimitCounting, LimitExceeded, LimitKind, LimitStanding, Limits, Reservation, Standing,
    SteadyClock,
};
use crate::places::InFlight;
use crate::salt::SaltKey;

/// Maximum number of tenants with a label of their own in metrics.
const LABELS_MAX: usize = 200;

/// A tenant: what its requests may use, and in whose cache their prompts are.
pub struct Tenant {
    /// The configured name.
    pub name: Name,
    /// The value of the metrics' label `tenant`.
    pub label: Name,
    /// The metric series of the tenant.
    pub series: TenantSeries,
    /// The share of the tenant among the clients of the queue and of the places in flight.
    pub share: ClientShare,
    /// Maximum priority of the tenant's requests; `None` leaves it to the model.
    pub priority_max: Option<i32>,
    /// Whether replies tell the tenant how a request was routed, over HTTP and gRPC.
    pub debug: bool,
    /// The configured limits.
    pub limits: TenantLimits,
    /// The names that the tenant may send as `model`; `None` for all.
    models: Option<HashSet<String>>,
    cache: CacheGroup,
    salt_key: SaltKey,
    /// The salt of requests without a salt of their client, derived once because most have none.
    salt: String,
    pub(crate) in_flight: Arc<InFlight>,
    /// What the tenant has used of its limits on requests and tokens.
    counted: Arc<Limits>,
    clock: SteadyClock,
}

/// The error for a client whose tenant has reached a limit.
fn refuse(exceeded: LimitExceeded, tokens: u64) -> Error {
    let (limit, retry_after_ms) = match exceeded {
        LimitExceeded::TooLarge { limit, .. } => (limit, None),
        // A client should not wait for the end of the day.
        LimitExceeded::Used { limit: LimitKind::TokensPerDay, .. } => {
            (LimitKind::TokensPerDay, None)
        }
        LimitExceeded::Used { limit, retry_after_ms } => (limit, Some(retry_after_ms)),
    };
    let (unit, key) = match limit {
        LimitKind::Requests => ("requests", "requests_per_minute"),
        LimitKind::TokensPerMinute => ("tokens", "tokens_per_minute"),
        LimitKind::TokensPerDay => ("tokens", "tokens_per_day"),
    };
    let message = match exceeded {
        LimitExceeded::TooLarge { maximum, .. } => format!(
            "the request may use {tokens} {unit}, and the tenant's limit is {maximum} \
             (limits.{key}): ask for fewer tokens (`max_tokens`)"
        ),
        LimitExceeded::Used { .. } => {
            format!("the tenant has used up its limit on {unit} (limits.{key})")
        }
    };
    Error::new(ErrorKind::LimitReached(LimitReached { limit: key, unit, retry_after_ms }), message)
}

impl Tenant {
    /// A tenant of a configuration, at this place in it; `before` is the tenant of that name in the
    /// previous one, whose requests are still in flight.
    pub(crate) fn new(
        config: &TenantConfig,
        place: usize,
        salt_key: SaltKey,
        counting: &LimitCounting,
        clock: SteadyClock,
        before: Option<&Self>,
    ) -> Self {
        // The hash is only a name for the tenant; 0 stands for clients that are not distinguished.
        let number = BuildHasherDefault::<FxHasher>::default().hash_one(&config.name) | 1;
        Self {
            name: config.name.as_str().into(),
            label: if place < LABELS_MAX { config.name.as_str().into() } else { "other".into() },
            series: TenantSeries::default(),
            share: ClientShare { number, weight: config.weight },
            priority_max: config.priority_max,
            debug: config.debug,
            limits: config.limits,
            models: config.models.as_ref().map(|models| models.iter().cloned().collect()),
            cache: config.cache.clone(),
            salt: salt_key.derive(&config.cache, &config.name, None),
            salt_key,
            in_flight: before.map(|before| Arc::clone(&before.in_flight)).unwrap_or_default(),
            counted: match before {
                Some(before) => Arc::clone(&before.counted),
                None => counting.limits(&config.name, &config.limits),
            },
            clock,
        }
    }

    /// Puts the configured limits into effect, if the tenant had others before. What was used stays
    /// used.
    pub(crate) fn apply_limits(&self, counting: &LimitCounting) {
        counting.change(&self.name, &self.counted, &self.limits, self.clock.now_ms());
    }

    /// Sets the gauges of the tenant's limits.
    pub fn observe_limits(&self, metrics: &Metrics) {
        let set = |limit: &str, most: f64, used: f64| {
            let labels = [&*self.label, limit];
            metrics.tenant_limit.with_label_values(&labels).set(most);
            metrics.tenant_limit_used.with_label_values(&labels).set(used / most.max(1.0));
        };
        if let Some(most) = self.limits.requests_in_flight {
            set("requests_in_flight", most as f64, self.in_flight.count() as f64);
        }
        let Some(standing) = self.standing() else { return };
        let Standing { requests, tokens_per_minute, tokens_per_day } = standing;
        for (limit, standing) in [
            ("requests_per_minute", requests),
            ("tokens_per_minute", tokens_per_minute),
            ("tokens_per_day", tokens_per_day),
        ] {
            if let Some(LimitStanding { limit: most, remaining, .. }) = standing {
                set(limit, most as f64, most.saturating_sub(remaining) as f64);
            }
        }
    }

    /// Whether requests and tokens of the tenant are limited.
    pub fn is_limited(&self) -> bool {
        let TenantLimits { requests_per_minute, tokens_per_minute, tokens_per_day, .. } =
            self.limits;
        [requests_per_minute, tokens_per_minute, tokens_per_day].iter().any(Option::is_some)
    }

    /// Checks whether the limit of requests allows one more, before anything is known of it. Counts
    /// nothing.
    ///
    /// # Errors
    /// A 429: the limit is used up.
    pub fn check_request_limit(&self) -> Result<(), Error> {
        if self.limits.requests_per_minute.is_none() {
            return Ok(());
        }
        let checked = self.counted.check_requests(self.clock.now_ms());
        checked.map_err(|exceeded| refuse(exceeded, 0))
    }

    /// Counts a request that may cost this number of tokens.
    ///
    /// # Errors
    /// A 429: a limit is used up, or the request is larger than a limit.
    pub fn reserve(&self, tokens: u64) -> Result<Reservation, Error> {
        let reserved = self.counted.reserve(self.clock.now_ms(), tokens);
        reserved.map_err(|exceeded| refuse(exceeded, tokens))
    }

    /// How much of the limits remains; `None` if the tenant has no limits.
    pub fn standing(&self) -> Option<Standing> {
        self.is_limited().then(|| self.counted.standing(self.clock.now_ms()))
    }

    /// Whether the tenant may send this name as `model`.
    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// Refuses a model that the tenant may not use.
    ///
    /// # Errors
    /// A 403 that names the model.
    pub fn check_model(&self, model: &str) -> Result<(), Error> {
        if self.may_use(model) {
            return Ok(());
        }
        let message = format!("the tenant may not use the model `{model}`");
        Err(Error::new(ErrorKind::NotPermitted, message).with_param("model"))
    }

    /// The salt of a request with this salt of its client. It separates the request's cached blocks
    /// from those of other cache groups.
    pub fn salt(&self, own: Option<&str>) -> String {
        match own {
            None => self.salt.clone(),
            own => self.salt_key.derive(&self.cache, &self.name, own),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tenant(config: serde_json::Value) -> Tenant {
        let config = serde_json::from_value(config).unwrap();
        let (key, clock) = (SaltKey::new(Some("secret")), SteadyClock::start());
        Tenant::new(&config, 0, key, &LimitCounting::Local(1.0), clock, None)
    }

    #[test]
    fn salts_are_those_of_the_cache_group_with_and_without_a_salt_of_the_client() {
        let key = SaltKey::new(Some("secret"));
        let shared = CacheGroup::Shared("team".into());
        for (group, config) in [
            (CacheGroup::Own, serde_json::json!({"name": "acme"})),
            (shared, serde_json::json!({"name": "acme", "cache": {"shared": "team"}})),
        ] {
            let tenant = tenant(config);
            for own in [None, Some(""), Some("x")] {
                assert_eq!(tenant.salt(own), key.derive(&group, "acme", own));
            }
        }
    }
}
