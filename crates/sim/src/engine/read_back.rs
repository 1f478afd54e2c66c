//! Prefill legs that read KV from another engine: what a decode engine keeps pinned after a decode leg
//! (read-back), or the prefix of a hand-off (a one-shot peer fetch).
//!
//! The real engine checks nothing: whatever the ids and the number of tokens say is copied under the
//! hashes of the new prompt. Here, everything that would make a reply wrong is an error.

use super::hand_off::{PullRequest, Source, prompt_fingerprint, refused};
use super::request::Request;
use crate::cache::Namespace;
use crate::config::SimConfig;
use crate::error::ApiError;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What a prefill leg reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Read {
    pub(crate) source: Source,
    /// Number of leading tokens of the prompt whose KV it is.
    pub(crate) tokens: usize,
}

impl Read {
    /// Whether the leg only makes the owner free the blocks: its prompt is one token.
    pub(crate) fn is_release(&self) -> bool {
        self.tokens == 1
    }

    /// Number of tokens that are read by a request that hits `hit_tokens` in its own cache.
    pub(crate) fn wanted_tokens(&self, hit_tokens: usize, config: &SimConfig) -> usize {
        let wanted = self.tokens.saturating_sub(hit_tokens);
        if wanted < config.recompute_threshold_tokens { 0 } else { wanted }
    }

    /// The question to the owner. It is asked even if nothing is wanted, so that the blocks are freed.
    pub(crate) fn question(&self, request: &Request, config: &SimConfig) -> PullRequest {
        let params = &request.params;
        let tokens = self.tokens.min(params.prompt.len());
        let wanted = self.wanted_tokens(request.cached_tokens, config);
        PullRequest {
            engine_id: self.source.engine_id.clone(),
            request_id: self.source.name.clone(),
            block_ids: self.source.block_ids.clone(),
            sampling_fingerprint: None,
            waits: false,
            num_tokens: None,
            is_found_by_id: false,
            kv_dtype: config.kv_dtype.clone(),
            prompt_fingerprint: fingerprint(&params.prompt[..tokens], &params.namespace),
            wanted_blocks: (wanted / config.block_size) as u64,
            read_tokens: Some(self.tokens),
        }
    }
}

/// Equal only for equal tokens with equal salts and adapters.
fn fingerprint(tokens: &[u32], namespace: &Namespace) -> u64 {
    let salt = namespace.salt.as_deref().unwrap_or_default();
    xxh3_64_with_seed(salt.as_bytes(), prompt_fingerprint(tokens, namespace))
}

/// Checks a read against the request whose blocks are kept: whole blocks, exactly as many ids, and
/// equal tokens.
pub(crate) fn check_read(
    pinned: &Request,
    pull: &PullRequest,
    tokens: usize,
) -> Result<(), ApiError> {
    let sequence = &pinned.sequence;
    let (blocks, block_size) = (sequence.blocks(), sequence.block_size());
    let other = |what| Err(refused("hand_off_mismatch", what));
    let ids = pull.block_ids.as_deref().unwrap_or_default();
    let is_release = tokens == 1;
    if !is_release {
        if !tokens.is_multiple_of(block_size) {
            return other("is read back in parts of blocks");
        }
        if blocks.get(..tokens / block_size) != Some(ids) {
            return other("is read back with other blocks than those of its tokens");
        }
    } else if ids != blocks {
        return other("is released with other blocks than those pinned");
    }
    // The KV of the last token was not computed.
    let computed = &sequence.tokens()[..sequence.tokens().len() - 1];
    let Some(read) = computed.get(..tokens) else {
        return other("is read back beyond its tokens");
    };
    let is_own = is_release || fingerprint(read, sequence.namespace()) == pull.prompt_fingerprint;
    if is_own { Ok(()) } else { other("is read back for other tokens, or another salt") }
}
