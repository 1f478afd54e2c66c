//! The two cluster models.

use splitrail_sim::cluster::ClusterConfig;

/// The detail of the cluster model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// The plain model, which another implementation can reproduce to the nanosecond.
    #[default]
    Reference,
    /// Adds what engines do: chunked prefill, transfers that wait for each other, prompt caches on
    /// decode workers, local prefills in chunks within decode steps.
    Engine,
}

/// Maximum tokens of one prefill iteration of an engine.
const ENGINE_BUDGET_TOKENS: u32 = 8192;
/// Tokens of a local prefill in one decode step.
const ENGINE_CHUNK_TOKENS: u32 = 2048;
/// How much of the shorter part of a mixed step adds to the longer part.
const ENGINE_INTERFERENCE: f64 = 0.3;

impl Model {
    /// A cluster of this model with eight prefill and four decode workers.
    pub fn cluster(self) -> ClusterConfig {
        let reference = ClusterConfig::default();
        match self {
            Self::Reference => reference,
            Self::Engine => ClusterConfig {
                budget_tokens: Some(ENGINE_BUDGET_TOKENS),
                chunk_tokens: ENGINE_CHUNK_TOKENS,
                interference: ENGINE_INTERFERENCE,
                contention: true,
                // As many blocks of prompts as fit into the KV memory of a decode worker.
                decode_cache_blocks: (reference.kv_capacity_tokens / 512) as usize,
                ..reference
            },
        }
    }
}
