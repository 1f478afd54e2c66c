//! The endpoints that a worker supports.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::breaker::Breaker;
use splitrail_api::Endpoint;
use splitrail_config::model::BreakerConfig;

/// Time for which a worker gets no requests for an endpoint that it lacks. Afterwards it is tried
/// again, since it may have been restarted with other options.
const REMEMBERED: Duration = Duration::from_secs(30);

/// The endpoints that every engine has that generates.
pub const BASIC_ENDPOINTS: [Endpoint; 2] = [Endpoint::Chat, Endpoint::Completions];

/// The number of endpoints.
const ENDPOINTS: usize = Endpoint::ALL.len();

/// The name of endpoints that need no model, in the label `leg` of metrics and in logs.
pub const TOKENIZER: &str = "tokenizer";

/// The endpoints that one worker lacks, and the circuit breaker of the endpoints that need no
/// model.
#[derive(Debug)]
pub struct EndpointSupport {
    epoch: Instant,
    /// For each endpoint, the time until which it gets no requests, in milliseconds since `epoch`.
    lacks_until_ms: [AtomicU64; ENDPOINTS],
    /// The circuit breaker of endpoints that need no model: the tokenizer may fail while the engine
    /// works, and the reverse.
    pub breaker: Breaker,
}

impl Default for EndpointSupport {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            lacks_until_ms: Default::default(),
            breaker: Breaker::new(BreakerConfig::default()),
        }
    }
}

impl EndpointSupport {
    fn of(&self, endpoint: Endpoint) -> Option<&AtomicU64> {
        self.lacks_until_ms.get(endpoint as usize)
    }

    /// Records that the worker lacks an endpoint.
    pub fn lacks(&self, endpoint: Endpoint, now: Instant) {
        let until = (now + REMEMBERED).saturating_duration_since(self.epoch).as_millis();
        if let Some(lacks_until_ms) = self.of(endpoint) {
            lacks_until_ms.store(u64::try_from(until).unwrap_or(u64::MAX), Relaxed);
        }
    }

    /// Whether the worker was found to lack an endpoint within the last 30 seconds.
    pub fn is_lacking(&self, endpoint: Endpoint, now: Instant) -> bool {
        let ms = now.saturating_duration_since(self.epoch).as_millis();
        self.of(endpoint).is_some_and(|until| u128::from(until.load(Relaxed)) > ms)
    }

    /// Forgets all results, because the worker may have been restarted.
    pub fn forget(&self) {
        self.lacks_until_ms.iter().for_each(|until| until.store(0, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_endpoint_is_remembered_for_a_time_by_worker_and_endpoint() {
        let offers = EndpointSupport::default();
        let now = Instant::now();
        assert!(!offers.is_lacking(Endpoint::Embeddings, now));
        offers.lacks(Endpoint::Embeddings, now);
        offers.lacks(Endpoint::Messages, now);
        assert!(offers.is_lacking(Endpoint::Embeddings, now));
        assert!(!offers.is_lacking(Endpoint::Tokenize, now));
        offers.lacks(Endpoint::CountTokens, now);
        assert!(offers.is_lacking(Endpoint::CountTokens, now));
        assert!(offers.is_lacking(Endpoint::Messages, now));
        assert!(!offers.is_lacking(Endpoint::Chat, now));
        assert!(!offers.is_lacking(Endpoint::Embeddings, now + REMEMBERED));
        offers.lacks(Endpoint::Detokenize, now);
        offers.forget();
        assert!(!offers.is_lacking(Endpoint::Detokenize, now));
    }
}
