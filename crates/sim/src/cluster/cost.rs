//! The simulated durations of prefills, KV transfers and decode steps: linear models, with a
//! quadratic attention term for prefills.

/// Coefficients of the cost model. The defaults describe a 70-billion-parameter model on an
/// eight-GPU node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Per prefill iteration, in seconds.
    pub prefill_base_s: f64,
    /// Per computed token, in seconds.
    pub prefill_token_s: f64,
    /// Per pair of a computed token and a token that it attends to, in seconds.
    pub prefill_pair_s: f64,
    /// Per KV transfer, in seconds.
    pub transfer_base_s: f64,
    /// Per fetch of a prefix from another worker, in seconds.
    pub fetch_base_s: f64,
    /// KV per token, in bytes.
    pub kv_bytes_per_token: f64,
    /// Bandwidth of a transfer, in bytes per second.
    pub transfer_bytes_per_s: f64,
    /// Per decode step, in seconds.
    pub step_base_s: f64,
    /// Per request in a step's batch, in seconds.
    pub step_request_s: f64,
    /// Per token of context in a step's batch, in seconds.
    pub step_context_s: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            prefill_base_s: 10e-3,
            prefill_token_s: 85e-6,
            prefill_pair_s: 2.3e-9,
            transfer_base_s: 5e-3,
            fetch_base_s: 5e-3,
            // 80 layers x 8 KV heads x 128 dimensions x 2 (key and value) x 2 bytes.
            kv_bytes_per_token: 327_680.0,
            transfer_bytes_per_s: 100e9,
            step_base_s: 15e-3,
            step_request_s: 0.1e-3,
            step_context_s: 30e-9,
        }
    }
}

/// Seconds as whole nanoseconds, with halves rounded away from zero.
pub fn ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

impl CostModel {
    /// Seconds to compute `tokens` new tokens after `context` tokens, without `prefill_base_s`.
    pub fn span_s(&self, tokens: u32, context: u32) -> f64 {
        let n = f64::from(tokens);
        self.prefill_token_s * n + self.prefill_pair_s * n * (f64::from(context) + n / 2.0)
    }

    /// Nanoseconds of a prefill of `input` tokens, of which `cached` need not be computed.
    pub fn prefill_ns(&self, input: u32, cached: u32) -> u64 {
        ns(self.prefill_base_s + self.span_s(input - cached, cached))
    }

    /// Seconds for which a transfer occupies its links.
    pub fn link_s(&self, tokens: u32) -> f64 {
        f64::from(tokens) * self.kv_bytes_per_token / self.transfer_bytes_per_s
    }

    /// Nanoseconds of a transfer that does not wait for others.
    pub fn transfer_ns(&self, tokens: u32) -> u64 {
        ns(self.transfer_base_s + self.link_s(tokens))
    }

    /// Seconds of a decode step; 0 without requests in the batch.
    pub fn step_s(&self, batch: u32, context: u64) -> f64 {
        if batch == 0 {
            return 0.0;
        }
        self.step_base_s
            + self.step_request_s * f64::from(batch)
            + self.step_context_s * context as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_equal_those_computed_by_hand() {
        let cost = CostModel::default();
        // 10 ms + 12,000 x 85 us + 2.3 ns x 12,000 x 6,000
        assert_eq!(cost.prefill_ns(12_000, 0), 1_195_600_000);
        // 10 ms + 488 x 85 us + 2.3 ns x 488 x (512 + 244)
        assert_eq!(cost.prefill_ns(1_000, 512), 52_328_534);
        // 5 ms + 1,000 x 3.2768 us
        assert_eq!(cost.transfer_ns(1_000), 8_276_800);
        assert_eq!(ns(cost.step_s(2, 1_001)), 15_230_030);
        assert_eq!(ns(cost.step_s(0, 0)), 0);
        assert_eq!(ns(2.5e-9), 3, "half away from zero");
    }
}
