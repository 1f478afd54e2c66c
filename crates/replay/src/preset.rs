//! The two cluster models.

use splitrail_sim::cluster::ClusterConfig;

/// How much of a cluster is modelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// The plain one, which another implementation can follow to the nanosecond.
    #[default]
    Reference,
    /// What engines add to it: chunked prefill, transfers that wait for each other, prompt
    /// caches on decode workers, local prefills in chunks beside decode steps.
    Engine,
}

/// Tokens that an engine packs into one prefill iteration.
const ENGINE_BUDGET_TOKENS: u32 = 8192;
/// Tokens of a local prefill beside one decode step.
const ENGINE_CHUNK_TOKENS: u32 = 2048;
/// How much of the shorter part of a mixed step adds to the longer one.
const ENGINE_INTERFERENCE: f64 = 0.3;

impl Model {
    /// A cluster of this kind with eight prefill and four decode workers.
    pub fn cluster(self) -> ClusterConfig {
        let reference = ClusterConfig::default();
        match self {
            Self::Reference => reference,
            Self::Engine => ClusterConfig {
                budget_tokens: Some(ENGINE_BUDGET_TOKENS),
                chunk_tokens: ENGINE_CHUNK_TOKENS,
                interference: ENGINE_INTERFERENCE,
                contention: true,
                // What the KV memory of a decode worker holds in prompts, were it full of them.
                decode_cache_blocks: (reference.kv_capacity_tokens / 512) as usize,
                ..reference
            },
        }
    }
}
