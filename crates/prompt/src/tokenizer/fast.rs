//! A faster tokenizer, used only where it gives the reference's ids.
//!
//! `fastokens` reads the same files and is about thirty times as fast, for the kinds of
//! tokenizers that most models have, and for most of these [`Compact`] is as fast in a tenth of
//! the memory. Whether a model's tokenizer is of such a kind is tested by its results: it is
//! compared with the reference on difficult texts when it is loaded. The reference is dropped by then:
//! each of the three takes as much memory to build as everything else.

use std::thread;

use serde_json::{Value, json};
use splitrail_kv::Chain;
use tokenizers::AddedToken;

use super::compact::Compact;
use super::file::File;
use super::memo::Memo;
use super::words::spelled;
use super::{pieces, proof};
use crate::spare;

/// What is kept of texts: the blocks of tens of megabytes.
const MEMO_BYTES: usize = 8 << 20;
/// Texts are cut into pieces of this length: a turn pays for its new text, and for one of them.
const PIECE_BYTES: usize = 4 << 10;

/// A tokenizer that has passed its proof.
pub(super) struct Fast {
    library: Library,
    /// Where texts may be cut.
    cut: Option<Cut>,
}

/// What is needed to take a text piece by piece.
struct Cut {
    memo: Memo,
    /// Without and with special tokens.
    around: [Around; 2],
}

/// The ids that are put before those of any text, and behind them.
struct Around {
    before: Vec<u32>,
    behind: Vec<u32>,
}

/// Who does the work.
enum Library {
    /// With words of our own, in a tenth of the memory.
    Compact(Box<Compact>),
    Whole(Box<fastokens::Tokenizer>),
}

/// What the reference does, once it is gone.
pub(super) struct Example {
    /// What it says of itself, with its added tokens, without vocabulary and merges.
    described: Value,
    added: Vec<AddedToken>,
    /// Hard texts with their ids, without and with special tokens.
    answers: Vec<(String, [Vec<u32>; 2])>,
}

impl Example {
    /// Has a reference show what it does.
    ///
    /// # Errors
    /// Why nobody else can do it.
    pub(super) fn of(
        reference: &tokenizers::Tokenizer,
        mut described: Value,
    ) -> Result<Self, String> {
        if reference.get_encode_special_tokens() {
            return Err("special tokens are split".to_owned());
        }
        let mut added: Vec<(u32, AddedToken)> =
            reference.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        // It takes note of this flag and goes by its own way.
        if added.iter().any(|(_, token)| token.single_word) {
            return Err("tokens that match as whole words only".to_owned());
        }
        described["added_tokens"] = added.iter().map(|(id, token)| with_id(*id, token)).collect();
        let added: Vec<AddedToken> = added.into_iter().map(|(_, token)| token).collect();
        let contents: Vec<&str> = added.iter().map(|token| token.content.as_str()).collect();
        let mut answers = Vec::new();
        for text in proof::texts(&contents, &words(reference)) {
            let ids = |special| -> Result<Vec<u32>, String> {
                let encoding = reference.encode_fast(text.as_str(), special);
                Ok(encoding.map_err(|error| error.to_string())?.get_ids().to_vec())
            };
            let both = [ids(false)?, ids(true)?];
            answers.push((text, both));
        }
        Ok(Self { described, added, answers })
    }
}

fn with_id(id: u32, token: &AddedToken) -> Value {
    let mut token = json!(token);
    token["id"] = json!(id);
    token
}

/// Some of the vocabulary, as text.
fn words(reference: &tokenizers::Tokenizer) -> Vec<String> {
    const COUNT: usize = 1024;
    let size = reference.get_vocab_size(false);
    let ids = (0..size).step_by((size / COUNT).max(1));
    ids.filter_map(|id| spelled(&reference.id_to_token(id as u32)?)).collect()
}

impl Fast {
    /// A tokenizer of the same file that does the same.
    ///
    /// # Errors
    /// Why there is none, or nobody can tell.
    pub(super) fn prove(file: &File<'_>, example: &Example) -> Result<Self, String> {
        stay_on_one_thread();
        match Compact::read(file, &example.described)
            .map(|compact| Library::Compact(Box::new(compact)))
        {
            Ok(compact) => match Self::prove_library(compact, example) {
                Ok(fast) => return Ok(fast),
                Err(why) => tracing::info!(why, "the compact tokenizer is of no use here"),
            },
            Err(why) => tracing::debug!(why, "no compact tokenizer"),
        }
        Self::prove_library(whole(file, &example.described)?, example)
    }

    fn prove_library(library: Library, example: &Example) -> Result<Self, String> {
        let fast = Self { library, cut: None };
        let can_be_cut = pieces::can_be_cut(&example.described, &example.added);
        let mut around = can_be_cut.then(|| fast.around()).flatten();
        for (text, answers) in &example.answers {
            for (at, wanted) in answers.iter().enumerate() {
                if fast.whole(text, at == 1).as_ref() != Some(wanted) {
                    return Err("other ids for a hard text".to_owned());
                }
                // Cut wherever it can be.
                around = around.filter(|around| {
                    let Around { before, behind } = &around[at];
                    let mut ids = before.clone();
                    let mut pieces = pieces::pieces(text, 0);
                    let all = pieces.try_for_each(|piece| fast.append(piece, &mut ids));
                    ids.extend(behind);
                    all.is_some() && ids == *wanted
                });
            }
        }
        let cut = around.map(|around| Cut { memo: Memo::new(MEMO_BYTES), around });
        Ok(Self { cut, ..fast })
    }

    /// What the post-processor puts around ids, if it does that and nothing else.
    fn around(&self) -> Option<[Around; 2]> {
        /// No token's.
        const ID: u32 = u32::MAX;
        let of = |special| {
            let all = self.finish(vec![ID], special);
            let at = all.iter().position(|id| *id == ID)?;
            Some(Around { before: all[..at].to_vec(), behind: all[at + 1..].to_vec() })
        };
        Some([of(false)?, of(true)?])
    }

    /// Appends the ids to a chain that has none yet. What is kept of the text is for chains of
    /// the same root.
    pub(super) fn chain(
        &self,
        text: &str,
        add_special_tokens: bool,
        chain: &mut Chain,
    ) -> Option<()> {
        let Some(Cut { memo, around }) = self.cut.as_ref().filter(|_| text.len() > PIECE_BYTES)
        else {
            chain.append(&self.whole(text, add_special_tokens)?);
            return Some(());
        };
        let Around { before, behind } = &around[usize::from(add_special_tokens)];
        chain.reserve(text.len() / 4);
        chain.append(before);
        let mut key = memo.start(chain, add_special_tokens);
        let mut ids = spare::ids(PIECE_BYTES);
        for piece in pieces::pieces(text, PIECE_BYTES) {
            key = key.with(piece);
            memo.append(key, chain, |chain| {
                ids.clear();
                self.append(piece, &mut ids)?;
                chain.append(&ids);
                Some(())
            })?;
        }
        chain.append(behind);
        spare::give_back_ids(ids);
        Some(())
    }

    /// Token ids of a text that is taken whole; `None` if the library gives up.
    pub(super) fn whole(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        match &self.library {
            Library::Compact(compact) => compact.encode(text, add_special_tokens),
            Library::Whole(whole) => {
                whole.encode_with_special_tokens(text, add_special_tokens).ok()
            }
        }
    }

    /// Appends a piece's ids.
    fn append(&self, piece: &str, ids: &mut Vec<u32>) -> Option<()> {
        match &self.library {
            Library::Compact(compact) => compact.append(piece, ids),
            Library::Whole(whole) => {
                ids.extend(whole.encode_with_special_tokens(piece, false).ok()?);
                Some(())
            }
        }
    }

    fn finish(&self, ids: Vec<u32>, add_special_tokens: bool) -> Vec<u32> {
        match &self.library {
            Library::Compact(compact) => compact.finish(ids, add_special_tokens),
            Library::Whole(whole) => whole.post_process(ids, add_special_tokens),
        }
    }
}

/// All of it by `fastokens`.
fn whole(file: &File<'_>, described: &Value) -> Result<Library, String> {
    let mut described = described.clone();
    for (name, text) in [("vocab", file.vocab), ("merges", file.merges)] {
        let text = text.map_or("null", |text| text.get());
        described["model"][name] = serde_json::from_str(text).map_err(|error| error.to_string())?;
    }
    let whole = fastokens::Tokenizer::from_json(described).map_err(|error| error.to_string())?;
    Ok(Library::Whole(Box::new(whole)))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_kv::{HashSeed, Namespace, chain_hashes};

    use super::super::reference;
    use super::*;

    /// A model's file with another pre-tokenizer, in that many ways the same.
    fn text(pattern: &str) -> Vec<u8> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/model");
        let text = std::fs::read(format!("{folder}/tokenizer.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&text).unwrap();
        file["normalizer"] = json!({ "type": "NFC" });
        file["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        ]});
        file.to_string().into_bytes()
    }

    fn prove(text: &[u8]) -> Fast {
        let (reference, described) = reference::build(text).unwrap();
        let example = Example::of(&reference, described.unwrap()).unwrap();
        Fast::prove(&File::read(text).unwrap(), &example).unwrap()
    }

    #[test]
    fn words_that_can_be_scanned_take_little_memory_and_have_the_ids_of_the_reference() {
        use fastokens::tiktoken::{CL100K_BASE_PATTERN, O200K_BASE_PATTERN, QWEN2_PATTERN};
        let prose = include_str!("../../../../README.md");
        for pattern in [CL100K_BASE_PATTERN, O200K_BASE_PATTERN, QWEN2_PATTERN] {
            let text = text(pattern);
            let fast = prove(&text);
            assert!(matches!(fast.library, Library::Compact(_)), "{pattern}");
            assert!(fast.cut.is_some(), "{pattern}");
            let (reference, _) = reference::build(&text).unwrap();
            let wanted = reference.encode_fast(prose, true).unwrap();
            assert_eq!(fast.whole(prose, true).unwrap(), wanted.get_ids(), "{pattern}");
            let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 16 };
            let mut hashes = Vec::new();
            chain_hashes(&namespace, HashSeed(7), wanted.get_ids(), &mut hashes);
            // Twice: what is remembered is the same.
            for _ in 0..2 {
                let mut chain = Chain::new(&namespace, HashSeed(7));
                fast.chain(prose, true, &mut chain).unwrap();
                assert_eq!(chain.tokens(), wanted.len(), "{pattern}");
                assert_eq!(chain.into_hashes(), hashes, "{pattern}");
            }
        }
    }

    #[test]
    fn other_words_are_left_to_the_whole_library() {
        let fast = prove(&text(r"\p{L}+|[^\p{L}]+"));
        assert!(matches!(fast.library, Library::Whole(_)));
    }

    #[test]
    fn who_does_otherwise_than_the_reference_is_not_believed() {
        let text = text(fastokens::tiktoken::QWEN2_PATTERN);
        let (reference, described) = reference::build(&text).unwrap();
        let mut example = Example::of(&reference, described.unwrap()).unwrap();
        let (_, answers) = example.answers.iter_mut().find(|(text, _)| text.len() > 40).unwrap();
        answers[1].push(7);
        let fast = Fast::prove(&File::read(&text).unwrap(), &example);
        assert_eq!(fast.err().as_deref(), Some("other ids for a hard text"));
    }

    #[test]
    fn a_reference_is_built_as_its_library_reads_it() {
        let text = text(fastokens::tiktoken::QWEN2_PATTERN);
        let (built, described) = reference::build(&text).unwrap();
        assert!(described.unwrap()["model"].get("vocab").is_none());
        let read = tokenizers::Tokenizer::from_bytes(&text).unwrap();
        let whole = |tokenizer| serde_json::to_value(tokenizer).unwrap();
        assert_eq!(whole(&built), whole(&read));
    }
}
