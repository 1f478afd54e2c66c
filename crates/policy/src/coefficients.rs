//! The coefficients of a worker's cost model, and the costs computed from them.

/// Coefficients of one worker. Times are in seconds: the model is
///
/// ```text
/// prefill(n new tokens after c)  = base + per_token x n + per_token_pair x n x (c + n / 2)
/// hand-off(tokens)               = base + tokens x bytes_per_token / bandwidth
/// fetch(tokens)                  = base + tokens x bytes_per_token / bandwidth
/// read-back(tokens)              = read_ratio x hand-off(tokens)
/// load(tokens of a tier)         = tokens x bytes_per_token / bandwidth of the tier
/// step(requests, context tokens) = base + per_request x requests + per_context_token x tokens
/// ```
///
/// The quadratic term comes from attention: every new token attends to all tokens before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// The fixed time of a prefill.
    pub prefill_base_seconds: f64,
    /// The time per computed token.
    pub prefill_seconds_per_token: f64,
    /// The time per computed token and token before it.
    pub prefill_seconds_per_token_pair: f64,
    /// The fixed time of a hand-off.
    pub hand_off_base_seconds: f64,
    /// The size of one token's KV in bytes.
    pub kv_bytes_per_token: f64,
    /// The bandwidth of the network between the two workers.
    pub bandwidth_bytes_per_second: f64,
    /// The fixed time of fetching a prefix from another worker: the requests that ask for it, and
    /// the latency of the transfer.
    pub fetch_base_seconds: f64,
    /// The bandwidth of the network for fetches.
    pub fetch_bytes_per_second: f64,
    /// How many times as long a read-back takes as a hand-off of as many tokens.
    pub read_ratio: f64,
    /// The speed at which blocks are loaded from host memory, from disk and from a store that is
    /// reached over the network, each in bytes per second.
    pub load_bytes_per_second: [f64; 3],
    /// The fixed time of a decode step.
    pub step_base_seconds: f64,
    /// The time per request in a decode step.
    pub step_seconds_per_request: f64,
    /// The time per token of context in a decode step.
    pub step_seconds_per_context_token: f64,
}

/// A model of 70 billion parameters on a node of eight accelerators. Coefficients that are not
/// configured or learned have these values.
impl Default for Coefficients {
    fn default() -> Self {
        Self {
            prefill_base_seconds: 10e-3,
            prefill_seconds_per_token: 85e-6,
            prefill_seconds_per_token_pair: 2.3e-9,
            hand_off_base_seconds: 5e-3,
            kv_bytes_per_token: 327_680.0,
            bandwidth_bytes_per_second: 100e9,
            fetch_base_seconds: 30e-3,
            fetch_bytes_per_second: 100e9,
            read_ratio: 1.0,
            load_bytes_per_second: [50e9, 5e9, 5e9],
            step_base_seconds: 15e-3,
            step_seconds_per_request: 0.1e-3,
            step_seconds_per_context_token: 30e-9,
        }
    }
}

impl Coefficients {
    /// The usual worker of a fleet: the one in the middle when they are ordered by the time of a
    /// prefill; of two, the faster one. One very slow worker therefore changes little.
    pub fn usual<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        /// The length of the prompt by which workers are ordered.
        const TOKENS: u64 = 2_000;
        let mut rest = all.clone();
        let Some(first) = rest.next() else { return Self::default() };
        // Usually all workers are equal.
        if rest.all(|one| one.prefill() == first.prefill()) {
            return *first;
        }
        let mut ordered: Vec<_> = all.map(|one| (one.prefill_seconds(TOKENS, 0), one)).collect();
        let middle = (ordered.len() - 1) / 2;
        *ordered.select_nth_unstable_by(middle, |a, b| a.0.total_cmp(&b.0)).1.1
    }

    /// The prefill coefficients: per prefill, per token, per pair of tokens.
    pub(crate) fn prefill(&self) -> [f64; 3] {
        [
            self.prefill_base_seconds,
            self.prefill_seconds_per_token,
            self.prefill_seconds_per_token_pair,
        ]
    }

    /// Seconds to compute `new_tokens` after `context_tokens`, without the base.
    pub fn span_seconds(&self, new_tokens: u64, context_tokens: u64) -> f64 {
        let (new, context) = (new_tokens as f64, context_tokens as f64);
        self.prefill_seconds_per_token * new
            + self.prefill_seconds_per_token_pair * new * (context + new / 2.0)
    }

    /// Seconds to prefill a prompt of which `cached_tokens` are cached.
    pub fn prefill_seconds(&self, prompt_tokens: u64, cached_tokens: u64) -> f64 {
        let new_tokens = prompt_tokens.saturating_sub(cached_tokens);
        self.prefill_base_seconds + self.span_seconds(new_tokens, cached_tokens)
    }

    /// The same in nanoseconds.
    pub fn prefill_ns(&self, prompt_tokens: u64, cached_tokens: u64) -> u64 {
        nanoseconds(self.prefill_seconds(prompt_tokens, cached_tokens))
    }

    /// The same coefficients of a worker whose hand-offs take `scale` times as long.
    pub fn with_hand_off_scale(self, scale: f64) -> Self {
        Self {
            hand_off_base_seconds: self.hand_off_base_seconds * scale,
            bandwidth_bytes_per_second: self.bandwidth_bytes_per_second / scale,
            ..self
        }
    }

    /// Seconds to hand over the KV of `tokens` tokens.
    pub fn hand_off_seconds(&self, tokens: u64) -> f64 {
        self.hand_off_base_seconds + self.hand_off_link_seconds(tokens)
    }

    /// Seconds for which such a hand-off occupies the links of both workers.
    pub fn hand_off_link_seconds(&self, tokens: u64) -> f64 {
        tokens as f64 * self.kv_bytes_per_token / self.bandwidth_bytes_per_second
    }

    /// The same in nanoseconds.
    pub fn hand_off_ns(&self, tokens: u64) -> u64 {
        nanoseconds(self.hand_off_seconds(tokens))
    }

    /// Seconds to fetch the KV of `tokens` tokens from another worker, without waits.
    pub fn fetch_seconds(&self, tokens: u64) -> f64 {
        self.fetch_base_seconds + self.fetch_link_seconds(tokens)
    }

    /// Seconds for which such a fetch occupies the links of both workers.
    pub fn fetch_link_seconds(&self, tokens: u64) -> f64 {
        tokens as f64 * self.kv_bytes_per_token / self.fetch_bytes_per_second
    }

    /// Seconds of a decode step of `requests` requests that have `context_tokens` tokens of context
    /// in total; 0 without requests.
    pub fn step_seconds(&self, requests: u64, context_tokens: u64) -> f64 {
        if requests == 0 {
            return 0.0;
        }
        self.step_base_seconds
            + self.step_seconds_per_request * requests as f64
            + self.step_seconds_per_context_token * context_tokens as f64
    }
}

/// Seconds in nanoseconds, rounded to the nearest integer (half away from zero); 0 for negative
/// values.
pub fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twelve_thousand_uncached_tokens_take_what_the_model_says() {
        let costs = Coefficients::default();
        assert_eq!(costs.prefill_ns(12_000, 0), 1_195_600_000);
        assert!(costs.prefill_ns(12_000, 6_000) < 1_195_600_000);
    }

    #[test]
    fn an_empty_step_takes_no_time() {
        let costs = Coefficients::default();
        assert_eq!(nanoseconds(costs.step_seconds(0, 0)), 0);
        assert_eq!(nanoseconds(costs.step_seconds(1, 0)), 15_100_000);
    }
}
