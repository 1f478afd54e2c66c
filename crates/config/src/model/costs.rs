//! The cost model of workers before costs have been learned.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use splitrail_policy::Coefficients;

/// The cost model of a model's workers, until the router has learned each worker's costs from its
/// stage times. The defaults are those of a model of 70 billion parameters on a node of eight
/// accelerators.
///
/// ```text
/// prefill(n new tokens after c)  = base + per_token x n + per_token_pair x n x (c + n / 2)
/// hand-off(tokens)               = base + tokens x kv_bytes_per_token / bandwidth
/// fetch(tokens)                  = base + tokens x kv_bytes_per_token / bandwidth
/// load(tokens of a tier)         = tokens x kv_bytes_per_token / bandwidth of the tier
/// step(requests, context tokens) = base + per_request x requests + per_context_token x tokens
/// ```
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct CostsConfig {
    /// Fixed cost of a prefill in milliseconds.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub prefill_base_ms: f64,
    /// Cost of a computed prompt token, in microseconds.
    #[schemars(range(min = 1e-3, max = 1e9))]
    pub prefill_us_per_token: f64,
    /// Cost of a computed prompt token for each token before it (attention), in nanoseconds.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub prefill_ns_per_token_pair: f64,
    /// Fixed cost of a hand-off in milliseconds.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub hand_off_base_ms: f64,
    /// Size of the KV of one token in bytes.
    #[schemars(range(min = 1.0, max = 1e9))]
    pub kv_bytes_per_token: f64,
    /// Bandwidth between two workers, in gigabytes (10^9 bytes) per second.
    #[schemars(range(min = 1e-3, max = 1e6))]
    pub bandwidth_gb_per_second: f64,
    /// Fixed cost of a peer fetch in milliseconds: two requests for one token, and the transfer.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub fetch_base_ms: f64,
    /// Speed of loading blocks from host memory, in gigabytes (10^9 bytes) per second.
    #[schemars(range(min = 1e-3, max = 1e6))]
    pub host_gb_per_second: f64,
    /// Speed of loading blocks from disk, likewise.
    #[schemars(range(min = 1e-3, max = 1e6))]
    pub disk_gb_per_second: f64,
    /// Speed of loading blocks from a store over the network, likewise.
    #[schemars(range(min = 1e-3, max = 1e6))]
    pub remote_gb_per_second: f64,
    /// Fixed cost of a decode step in milliseconds.
    #[schemars(range(min = 1e-3, max = 1e6))]
    pub step_base_ms: f64,
    /// Cost of each request in the step, in microseconds.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub step_us_per_request: f64,
    /// Cost of each context token of the step's requests, in nanoseconds.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub step_ns_per_context_token: f64,
}

impl Default for CostsConfig {
    fn default() -> Self {
        Coefficients::default().into()
    }
}

impl From<Coefficients> for CostsConfig {
    fn from(costs: Coefficients) -> Self {
        // What is shown to people needs no more digits than they can tell apart.
        let [host, disk, remote] = costs.load_bytes_per_second;
        let tidy = |value: f64| (value * 1e6).round() / 1e6;
        Self {
            prefill_base_ms: tidy(costs.prefill_base_seconds * 1e3),
            prefill_us_per_token: tidy(costs.prefill_seconds_per_token * 1e6),
            prefill_ns_per_token_pair: tidy(costs.prefill_seconds_per_token_pair * 1e9),
            hand_off_base_ms: tidy(costs.hand_off_base_seconds * 1e3),
            kv_bytes_per_token: costs.kv_bytes_per_token,
            bandwidth_gb_per_second: tidy(costs.bandwidth_bytes_per_second / 1e9),
            fetch_base_ms: tidy(costs.fetch_base_seconds * 1e3),
            host_gb_per_second: tidy(host / 1e9),
            disk_gb_per_second: tidy(disk / 1e9),
            remote_gb_per_second: tidy(remote / 1e9),
            step_base_ms: tidy(costs.step_base_seconds * 1e3),
            step_us_per_request: tidy(costs.step_seconds_per_request * 1e6),
            step_ns_per_context_token: tidy(costs.step_seconds_per_context_token * 1e9),
        }
    }
}

impl From<CostsConfig> for Coefficients {
    fn from(costs: CostsConfig) -> Self {
        let load = [costs.host_gb_per_second, costs.disk_gb_per_second, costs.remote_gb_per_second];
        Self {
            prefill_base_seconds: costs.prefill_base_ms / 1e3,
            prefill_seconds_per_token: costs.prefill_us_per_token / 1e6,
            prefill_seconds_per_token_pair: costs.prefill_ns_per_token_pair / 1e9,
            hand_off_base_seconds: costs.hand_off_base_ms / 1e3,
            kv_bytes_per_token: costs.kv_bytes_per_token,
            bandwidth_bytes_per_second: costs.bandwidth_gb_per_second * 1e9,
            fetch_base_seconds: costs.fetch_base_ms / 1e3,
            fetch_bytes_per_second: costs.bandwidth_gb_per_second * 1e9,
            // Learned alone.
            read_ratio: 1.0,
            load_bytes_per_second: load.map(|gb_per_second| gb_per_second * 1e9),
            step_base_seconds: costs.step_base_ms / 1e3,
            step_seconds_per_request: costs.step_us_per_request / 1e6,
            step_seconds_per_context_token: costs.step_ns_per_context_token / 1e9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_model_s_in_both_forms() {
        let back = Coefficients::from(CostsConfig::default());
        assert_eq!(back.prefill_ns(12_000, 0), Coefficients::default().prefill_ns(12_000, 0));
        assert_eq!(back.hand_off_ns(9000), Coefficients::default().hand_off_ns(9000));
        assert_eq!(back.step_seconds(9, 90_000), Coefficients::default().step_seconds(9, 90_000));
    }
}
