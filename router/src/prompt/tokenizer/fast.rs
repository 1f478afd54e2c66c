//! A quicker tokenizer, believed only where it gives the reference's ids.
//!
//! `fastokens` reads the same files and is some thirty times as fast, for the kinds of
//! tokenizers that most models have. Whether a model's is one of them is not asked of its
//! words but of its work: it is compared with the reference on hard texts when it is loaded.

use std::thread;

use tokenizers::AddedToken;

use super::proof;

/// What is kept of segments between special tokens, so that a turn of a conversation pays for
/// its new text only.
const SEGMENT_CACHE_BYTES: usize = 16 << 20;

/// A tokenizer that has passed its proof.
pub(super) struct Fast(fastokens::Tokenizer);

impl Fast {
    /// The same tokenizer as the reference.
    ///
    /// # Errors
    /// Why it is not the same, or nobody can tell.
    pub(super) fn prove(reference: &tokenizers::Tokenizer) -> Result<Self, String> {
        if reference.get_encode_special_tokens() {
            return Err("special tokens are split".to_owned());
        }
        let added: Vec<AddedToken> = reference.get_added_tokens_decoder().into_values().collect();
        // It takes note of this flag and goes by its own way.
        if added.iter().any(|token| token.single_word) {
            return Err("tokens that match as whole words only".to_owned());
        }
        stay_on_one_thread();
        let described = serde_json::to_value(reference).map_err(|error| error.to_string())?;
        let fast = fastokens::Tokenizer::from_json(described).map_err(|error| error.to_string())?;
        let mut fast = Self(fast);
        fast.0.enable_segment_cache(SEGMENT_CACHE_BYTES);
        let contents: Vec<&str> = added.iter().map(|token| token.content.as_str()).collect();
        for text in proof::texts(&contents) {
            for special in [false, true] {
                let wanted = reference.encode_fast(text.as_str(), special);
                let wanted = wanted.map_err(|error| error.to_string())?;
                if fast.encode(&text, special).as_deref() != Some(wanted.get_ids()) {
                    return Err("other ids for a hard text".to_owned());
                }
            }
        }
        Ok(fast)
    }

    /// Token ids; `None` if the library gives up.
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        self.0.encode_with_special_tokens(text, add_special_tokens).ok()
    }
}

/// The library spreads long texts over threads of its own, as many as its first caller may
/// run on. Requests are many at a time, and each has its thread: a caller that may run on one
/// processor only decides that it has none.
#[cfg(target_os = "linux")]
fn stay_on_one_thread() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let decide = || {
        let allowed = sched_getaffinity(None).ok()?;
        let one = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu))?;
        let mut only = CpuSet::new();
        only.set(one);
        sched_setaffinity(None, &only).ok()?;
        Some(fastokens::fanout::threads())
    };
    // Where that cannot be arranged, long texts take several threads: no harm is done.
    let _decided = thread::spawn(decide).join();
}

#[cfg(not(target_os = "linux"))]
fn stay_on_one_thread() {}
