//! The line in the log that says how the prefix caches do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use crate::core::Core;
use crate::telemetry::metrics::Metrics;

/// Totals of one model's completed requests, as the metrics have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests with cached tokens.
    pub hit_requests: u64,
    /// Requests without.
    pub miss_requests: u64,
    /// Prompt tokens, each prompt once.
    pub prompt_tokens: u64,
    /// Of these: cached.
    pub cached_tokens: u64,
}

impl Totals {
    /// Reads a model's counters.
    pub fn read(metrics: &Metrics, model: &str) -> Self {
        let requests = |result| metrics.prefix_cache_requests.with_label_values(&[model, result]);
        let cached = |source| metrics.cached_tokens.with_label_values(&[model, source]);
        Self {
            hit_requests: requests("hit").get(),
            miss_requests: requests("miss").get(),
            prompt_tokens: metrics.usage_prompt_tokens.with_label_values(&[model]).get(),
            cached_tokens: cached("engine").get() + cached("estimate").get(),
        }
    }

    /// Requests.
    pub fn requests(self) -> u64 {
        self.hit_requests + self.miss_requests
    }

    /// Share of requests with cached tokens.
    pub fn hit_rate(self) -> f64 {
        share(self.hit_requests, self.requests())
    }

    /// Share of prompt tokens that were cached.
    pub fn token_hit_rate(self) -> f64 {
        share(self.cached_tokens, self.prompt_tokens)
    }

    /// What came since `earlier`.
    fn since(self, earlier: Self) -> Self {
        Self {
            hit_requests: self.hit_requests - earlier.hit_requests,
            miss_requests: self.miss_requests - earlier.miss_requests,
            prompt_tokens: self.prompt_tokens - earlier.prompt_tokens,
            cached_tokens: self.cached_tokens - earlier.cached_tokens,
        }
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64 * 1e4).round() / 1e4 }
}

/// Writes the totals into the log.
#[derive(Debug, Default)]
pub struct Summary {
    last: BTreeMap<String, Totals>,
}

impl Summary {
    /// Says the totals of each model that has had requests since the last time.
    pub fn say(&mut self, core: &Core) {
        let serving = core.serving();
        self.last.retain(|model, _| serving.model(model).is_some());
        for served in &serving.models {
            let last = self.last.entry(served.name().to_owned()).or_default();
            let totals = Totals::read(&core.metrics, served.name());
            let recent = totals.since(std::mem::replace(last, totals));
            if recent.requests() == 0 {
                continue;
            }
            tracing::info!(
                model = served.name(),
                requests = totals.requests(),
                hit_requests = totals.hit_requests,
                miss_requests = totals.miss_requests,
                hit_rate = totals.hit_rate(),
                prompt_tokens = totals.prompt_tokens,
                cached_tokens = totals.cached_tokens,
                token_hit_rate = totals.token_hit_rate(),
                recent_requests = recent.requests(),
                recent_token_hit_rate = recent.token_hit_rate(),
                "prefix cache"
            );
        }
    }
}

/// Says the totals from time to time, until the task is ended.
pub async fn run(core: Arc<Core>, every: Duration) {
    let mut summary = Summary::default();
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        summary.say(&core);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_shares_and_nothing_divides_by_zero() {
        let metrics = Metrics::new().unwrap();
        assert_eq!(Totals::read(&metrics, "m").token_hit_rate(), 0.0);
        metrics.prefix_cache_requests.with_label_values(&["m", "hit"]).inc();
        metrics.prefix_cache_requests.with_label_values(&["m", "miss"]).inc_by(3);
        metrics.usage_prompt_tokens.with_label_values(&["m"]).inc_by(1000);
        metrics.cached_tokens.with_label_values(&["m", "engine"]).inc_by(300);
        metrics.cached_tokens.with_label_values(&["m", "estimate"]).inc_by(33);
        let totals = Totals::read(&metrics, "m");
        assert_eq!(
            (totals.requests(), totals.hit_rate(), totals.token_hit_rate()),
            (4, 0.25, 0.333)
        );
        assert_eq!(totals.since(totals), Totals::default());
    }
}
