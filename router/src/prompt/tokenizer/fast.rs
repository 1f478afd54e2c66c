//! A quicker tokenizer, believed only where it gives the reference's ids.
//!
//! `fastokens` reads the same files and is some thirty times as fast, for the kinds of
//! tokenizers that most models have. Whether a model's is one of them is not asked of its
//! words but of its work: it is compared with the reference on hard texts when it is loaded.

use std::thread;

use tokenizers::AddedToken;

use super::memo::{Memo, Tenant};
use super::{pieces, proof};

/// What is kept of pieces of text and their ids.
const MEMO_BYTES: usize = 8 << 20;
/// Texts are cut into pieces of this length: a turn pays for its new text, and for one of them.
const PIECE_BYTES: usize = 4 << 10;

/// A tokenizer that has passed its proof.
pub(super) struct Fast {
    library: fastokens::Tokenizer,
    /// Where texts may be cut.
    memo: Option<Memo>,
}

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
        let mut can_be_cut = pieces::can_be_cut(&described, &added);
        let library =
            fastokens::Tokenizer::from_json(described).map_err(|error| error.to_string())?;
        let fast = Self { library, memo: None };
        let contents: Vec<&str> = added.iter().map(|token| token.content.as_str()).collect();
        for text in proof::texts(&contents) {
            for special in [false, true] {
                let wanted = reference.encode_fast(text.as_str(), special);
                let wanted = wanted.map_err(|error| error.to_string())?;
                if fast.whole(&text, special).as_deref() != Some(wanted.get_ids()) {
                    return Err("other ids for a hard text".to_owned());
                }
                // Cut wherever it can be.
                let pieces: Option<Vec<Vec<u32>>> =
                    pieces::pieces(&text, 0).map(|piece| fast.whole(piece, false)).collect();
                let ids = fast.library.post_process(pieces.unwrap_or_default().concat(), special);
                can_be_cut &= ids == wanted.get_ids();
            }
        }
        Ok(Self { memo: can_be_cut.then(|| Memo::new(MEMO_BYTES)), ..fast })
    }

    /// Token ids; `None` if the library gives up. What is kept of the text is for the tenant.
    pub(super) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        tenant: Tenant,
    ) -> Option<Vec<u32>> {
        let Some(memo) = self.memo.as_ref().filter(|_| text.len() > PIECE_BYTES) else {
            return self.whole(text, add_special_tokens);
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        for piece in pieces::pieces(text, PIECE_BYTES) {
            memo.append(tenant, piece, &mut ids, || self.whole(piece, false))?;
        }
        Some(self.library.post_process(ids, add_special_tokens))
    }

    fn whole(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        self.library.encode_with_special_tokens(text, add_special_tokens).ok()
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
