//! What the general checks of a file need to know about the router's configuration.

use splitrail_settings::Dialect;

/// The hints of the checks that are specific to the router: keys that were renamed or are
/// planned, and keys whose values are secret.
pub(super) const DIALECT: Dialect = Dialect {
    later_keys: &["cache_isolation", "tenants", "tls"],
    later_values: &[("tokenizer", "engine")],
    renamed_keys: &[("limits.bodies_max_bytes", "request_memory_max_bytes")],
    secret_keys: &["engine_api_key", "fleet.token", "events.login"],
    empty: "start from deploy/splitrail.example.yaml",
    too_large: "split the fleet over several routers",
};
