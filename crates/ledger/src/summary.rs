//! Writes the log line that summarises the hits of the prefix caches.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prometheus::core::Collector as _;

use splitrail_telemetry::Metrics;

/// Totals of one model's served requests, read from the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests with cached tokens.
    pub hit_requests: u64,
    /// Requests without cached tokens.
    pub miss_requests: u64,
    /// Prompt tokens, with each prompt counted once.
    pub prompt_tokens: u64,
    /// The part of the prompt tokens that was cached.
    pub cached_tokens: u64,
    /// Prompt tokens that workers found in their own caches. If a prompt has a prefill and a decode
    /// leg, tokens that both workers hold are counted twice.
    pub local_hit_tokens: u64,
    /// Prompt tokens whose KV prefill workers read back from decode workers.
    pub read_back_tokens: u64,
    /// Prompt tokens whose KV prefill legs themselves took from workers that held them.
    pub fetched_tokens: u64,
    /// Prompt tokens whose KV decode workers received by a hand-off.
    pub transferred_tokens: u64,
    /// Prompt tokens that workers computed.
    pub computed_tokens: u64,
    /// Generated tokens.
    pub generation_tokens: u64,
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
            local_hit_tokens: by_source(metrics, model, "local_cache_hit"),
            read_back_tokens: by_source(metrics, model, "read_back"),
            fetched_tokens: by_source(metrics, model, "fetched"),
            transferred_tokens: by_source(metrics, model, "external_kv_transfer"),
            computed_tokens: by_source(metrics, model, "local_compute"),
            generation_tokens: metrics.generation_tokens.with_label_values(&[model]).get(),
        }
    }

    /// The number of requests.
    pub fn requests(self) -> u64 {
        self.hit_requests + self.miss_requests
    }

    /// The share of requests with cached tokens, from 0 to 1.
    pub fn hit_rate(self) -> f64 {
        share(self.hit_requests, self.requests())
    }

    /// The share of prompt tokens that were cached, from 0 to 1.
    pub fn token_hit_rate(self) -> f64 {
        share(self.cached_tokens, self.prompt_tokens)
    }

    /// The difference from an earlier reading.
    fn since(self, earlier: Self) -> Self {
        Self {
            hit_requests: self.hit_requests - earlier.hit_requests,
            miss_requests: self.miss_requests - earlier.miss_requests,
            prompt_tokens: self.prompt_tokens - earlier.prompt_tokens,
            cached_tokens: self.cached_tokens - earlier.cached_tokens,
            local_hit_tokens: self.local_hit_tokens - earlier.local_hit_tokens,
            read_back_tokens: self.read_back_tokens - earlier.read_back_tokens,
            fetched_tokens: self.fetched_tokens - earlier.fetched_tokens,
            transferred_tokens: self.transferred_tokens - earlier.transferred_tokens,
            computed_tokens: self.computed_tokens - earlier.computed_tokens,
            generation_tokens: self.generation_tokens - earlier.generation_tokens,
        }
    }
}

/// The sum of `splitrail_prompt_tokens_total` over a model's legs and tiers.
fn by_source(metrics: &Metrics, model: &str, source: &str) -> u64 {
    let mut sum = 0.0;
    for family in metrics.prompt_tokens.collect() {
        for series in family.get_metric() {
            let has = |name: &str, value: &str| {
                series.get_label().iter().any(|pair| pair.name() == name && pair.value() == value)
            };
            if has("model", model) && has("source", source) {
                sum += series.get_counter().get_value();
            }
        }
    }
    sum as u64
}

/// Tokens per second, rounded to tenths; `None` if no time has passed.
fn per_second(tokens: u64, passed: Duration) -> Option<f64> {
    let rate = tokens as f64 / passed.as_secs_f64();
    rate.is_finite().then_some((rate * 10.0).round() / 10.0)
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64 * 1e4).round() / 1e4 }
}

/// Writes the totals to the log at intervals.
#[derive(Debug)]
pub struct Summary {
    last: BTreeMap<String, Totals>,
    logged_at: Instant,
}

impl Summary {
    /// A summary whose first interval begins at `now`.
    pub fn new(now: Instant) -> Self {
        Self { last: BTreeMap::new(), logged_at: now }
    }

    /// Logs the totals of each model that has had requests since the last call.
    pub fn say(&mut self, metrics: &Metrics, models: &[&str], now: Instant) {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.logged_at, now));
        self.last.retain(|model, _| models.contains(&model.as_str()));
        for &model in models {
            let last = self.last.entry(model.to_owned()).or_default();
            let totals = Totals::read(metrics, model);
            let recent = totals.since(std::mem::replace(last, totals));
            if recent.requests() == 0 {
                continue;
            }
            tracing::info!(
                model,
                requests = totals.requests(),
                hit_requests = totals.hit_requests,
                miss_requests = totals.miss_requests,
                hit_rate = totals.hit_rate(),
                prompt_tokens = totals.prompt_tokens,
                cached_tokens = totals.cached_tokens,
                token_hit_rate = totals.token_hit_rate(),
                local_hit_tokens = totals.local_hit_tokens,
                read_back_tokens = totals.read_back_tokens,
                fetched_tokens = totals.fetched_tokens,
                transferred_tokens = totals.transferred_tokens,
                computed_tokens = totals.computed_tokens,
                recent_requests = recent.requests(),
                recent_token_hit_rate = recent.token_hit_rate(),
                prompt_tokens_per_s = per_second(recent.prompt_tokens, passed),
                generation_tokens_per_s = per_second(recent.generation_tokens, passed),
                "prefix cache"
            );
        }
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
        for (leg, source, tier, tokens) in [
            ("prefill", "local_cache_hit", "device", 30),
            ("decode", "local_cache_hit", "host", 3),
            ("decode", "external_kv_transfer", "none", 67),
            ("prefill", "local_compute", "none", 70),
        ] {
            let labels = ["m", leg, source, tier];
            metrics.prompt_tokens.with_label_values(&labels).inc_by(tokens);
        }
        metrics.prompt_tokens.with_label_values(&["n", "decode", "local_compute", "none"]).inc();
        let totals = Totals::read(&metrics, "m");
        let by_source =
            [totals.local_hit_tokens, totals.transferred_tokens, totals.computed_tokens];
        assert_eq!(by_source, [33, 67, 70]);
        assert_eq!(per_second(1234, Duration::from_secs(10)), Some(123.4));
        assert_eq!(per_second(1, Duration::ZERO), None);
    }
}
