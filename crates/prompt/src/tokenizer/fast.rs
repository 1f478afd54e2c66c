//! A faster tokenizer, used only where it gives the reference's ids.
//!
//! `fastokens` reads the same files and is about thirty times as fast for the kinds of tokenizers
//! that most models have; for most of these, [`CompactTokenizer`] is as fast with a tenth of the memory.
//! Whether a model's tokenizer is of such a kind is tested by its results: at loading, it is
//! compared with the reference on difficult texts. The reference is dropped before that: each of
//! the three takes as much memory to build as everything else.

use std::thread;

use serde_json::{Value, json};
use splitrail_kv::Chain;
use tokenizers::AddedToken;

use super::compact::CompactTokenizer;
use super::file::File;
use super::memo::Memo;
use super::words::spelled;
use super::{pieces, proof};
use crate::spare;

/// Maximum size of the cache of prefixes in bytes; enough for the blocks of tens of megabytes of
/// text.
const MEMO_BYTES: usize = 8 << 20;
/// Minimum size of a cached piece in bytes: a turn of a conversation costs its new text and one
/// piece.
const PIECE_BYTES: usize = 4 << 10;

/// A tokenizer whose ids were compared with the reference.
pub(super) struct FastTokenizer {
    library: FastLibrary,
    /// Present if texts may be cut into pieces.
    cut: Option<PieceTokenizer>,
}

/// What is needed to tokenise a text in pieces.
struct PieceTokenizer {
    memo: Memo,
    /// The additions without and with special tokens.
    around: [SurroundingIds; 2],
}

/// The ids that the post-processor puts before and after those of a text.
struct SurroundingIds {
    before: Vec<u32>,
    behind: Vec<u32>,
}

/// The library that tokenises.
enum FastLibrary {
    /// This crate's own word encoder, with a tenth of the memory.
    Compact(Box<CompactTokenizer>),
    Whole(Box<fastokens::Tokenizer>),
}

/// What must be known of the reference after it has been dropped.
pub(super) struct Example {
    /// The reference's description with its added tokens, without vocabulary and merges.
    described: Value,
    added: Vec<AddedToken>,
    /// Difficult texts with their ids, without and with special tokens.
    answers: Vec<(String, [Vec<u32>; 2])>,
}

impl Example {
    /// Records what a reference does.
    ///
    /// # Errors
    /// Why no other library can replace it.
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
        // `fastokens` reads this flag but treats such tokens differently.
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

/// A sample of the vocabulary, as text.
fn words(reference: &tokenizers::Tokenizer) -> Vec<String> {
    const COUNT: usize = 1024;
    let size = reference.get_vocab_size(false);
    let ids = (0..size).step_by((size / COUNT).max(1));
    ids.filter_map(|id| spelled(&reference.id_to_token(id as u32)?)).collect()
}

impl FastTokenizer {
    /// Builds a faster tokenizer of the same file with the same ids.
    ///
    /// # Errors
    /// Why there is none, or why the ids could not be compared.
    pub(super) fn prove(file: &File<'_>, example: &Example) -> Result<Self, String> {
        stay_on_one_thread();
        match CompactTokenizer::read(file, &example.described)
            .map(|compact| FastLibrary::Compact(Box::new(compact)))
        {
            Ok(compact) => match Self::prove_library(compact, example) {
                Ok(fast) => return Ok(fast),
                Err(why) => {
                    tracing::info!(why, "the compact tokenizer gives other ids for this model")
                }
            },
            Err(why) => tracing::debug!(why, "no compact tokenizer"),
        }
        Self::prove_library(whole(file, &example.described)?, example)
    }

    fn prove_library(library: FastLibrary, example: &Example) -> Result<Self, String> {
        let fast = Self { library, cut: None };
        let can_be_cut = pieces::can_be_cut(&example.described, &example.added);
        let mut around = can_be_cut.then(|| fast.around()).flatten();
        for (text, answers) in &example.answers {
            for (at, wanted) in answers.iter().enumerate() {
                if fast.whole(text, at == 1).as_ref() != Some(wanted) {
                    return Err("the ids of a difficult text differ".to_owned());
                }
                // Compares also with cuts at every possible place.
                around = around.filter(|around| {
                    let SurroundingIds { before, behind } = &around[at];
                    let mut ids = before.clone();
                    let mut pieces = pieces::pieces(text, 0);
                    let all = pieces.try_for_each(|piece| fast.append(piece, &mut ids));
                    ids.extend(behind);
                    all.is_some() && ids == *wanted
                });
            }
        }
        let cut = around.map(|around| PieceTokenizer { memo: Memo::new(MEMO_BYTES), around });
        Ok(Self { cut, ..fast })
    }

    /// The ids that the post-processor puts around those of a text; `None` if it does anything
    /// else.
    fn around(&self) -> Option<[SurroundingIds; 2]> {
        /// An id that no token has.
        const ID: u32 = u32::MAX;
        let of = |special| {
            let all = self.finish(vec![ID], special);
            let at = all.iter().position(|id| *id == ID)?;
            Some(SurroundingIds { before: all[..at].to_vec(), behind: all[at + 1..].to_vec() })
        };
        Some([of(false)?, of(true)?])
    }

    /// Appends the ids of a text to a chain that is still empty. Cached pieces are used only for
    /// chains with the same root.
    pub(super) fn chain(
        &self,
        text: &str,
        add_special_tokens: bool,
        chain: &mut Chain,
    ) -> Option<()> {
        let Some(PieceTokenizer { memo, around }) =
            self.cut.as_ref().filter(|_| text.len() > PIECE_BYTES)
        else {
            chain.append(&self.whole(text, add_special_tokens)?);
            return Some(());
        };
        let SurroundingIds { before, behind } = &around[usize::from(add_special_tokens)];
        chain.reserve(text.len() / 4);
        chain.append(before);
        let mut key = memo.start(chain, add_special_tokens);
        let mut ids = spare::IDS.with(|spare| spare.take(PIECE_BYTES));
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
        spare::IDS.with(|spare| spare.give_back(ids));
        Some(())
    }

    /// Token ids of a text that is not cut; `None` if the library fails.
    pub(super) fn whole(&self, text: &str, add_special_tokens: bool) -> Option<Vec<u32>> {
        match &self.library {
            FastLibrary::Compact(compact) => compact.encode(text, add_special_tokens),
            FastLibrary::Whole(whole) => {
                whole.encode_with_special_tokens(text, add_special_tokens).ok()
            }
        }
    }

    /// Appends the ids of a piece.
    fn append(&self, piece: &str, ids: &mut Vec<u32>) -> Option<()> {
        match &self.library {
            FastLibrary::Compact(compact) => compact.append(piece, ids),
            FastLibrary::Whole(whole) => {
                ids.extend(whole.encode_with_special_tokens(piece, false).ok()?);
                Some(())
            }
        }
    }

    fn finish(&self, ids: Vec<u32>, add_special_tokens: bool) -> Vec<u32> {
        match &self.library {
            FastLibrary::Compact(compact) => compact.finish(ids, add_special_tokens),
            FastLibrary::Whole(whole) => whole.post_process(ids, add_special_tokens),
        }
    }
}

/// The tokenizer of `fastokens` for a file.
fn whole(file: &File<'_>, described: &Value) -> Result<FastLibrary, String> {
    let mut described = described.clone();
    for (name, text) in [("vocab", file.vocab), ("merges", file.merges)] {
        let text = text.map_or("null", |text| text.get());
        described["model"][name] = serde_json::from_str(text).map_err(|error| error.to_string())?;
    }
    let whole = fastokens::Tokenizer::from_json(described).map_err(|error| error.to_string())?;
    Ok(FastLibrary::Whole(Box::new(whole)))
}

/// The library distributes long texts over threads of its own, as many as its first caller may use.
/// The router tokenises many requests in parallel, each on its own thread. So the first call is
/// made from a thread that may use one processor only, and the library uses no further threads.
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
    // If this fails, long texts use several threads, which does no harm.
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

    /// The fixture's file with another pre-tokenizer, which splits text in the same way.
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

    fn prove(text: &[u8]) -> FastTokenizer {
        let (reference, described) = reference::build(text).unwrap();
        let example = Example::of(&reference, described.unwrap()).unwrap();
        FastTokenizer::prove(&File::read(text).unwrap(), &example).unwrap()
    }

    #[test]
    fn the_compact_tokenizer_has_the_ids_of_the_reference() {
        use fastokens::tiktoken::{CL100K_BASE_PATTERN, O200K_BASE_PATTERN, QWEN2_PATTERN};
        let prose = include_str!("../../../../README.md");
        for pattern in [CL100K_BASE_PATTERN, O200K_BASE_PATTERN, QWEN2_PATTERN] {
            let text = text(pattern);
            let fast = prove(&text);
            assert!(matches!(fast.library, FastLibrary::Compact(_)), "{pattern}");
            assert!(fast.cut.is_some(), "{pattern}");
            let (reference, _) = reference::build(&text).unwrap();
            let wanted = reference.encode_fast(prose, true).unwrap();
            assert_eq!(fast.whole(prose, true).unwrap(), wanted.get_ids(), "{pattern}");
            let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 16 };
            let mut hashes = Vec::new();
            chain_hashes(&namespace, HashSeed(7), wanted.get_ids(), &mut hashes);
            // The second time, the text is found in the cache, with the same result.
            for _ in 0..2 {
                let mut chain = Chain::new(&namespace, HashSeed(7));
                fast.chain(prose, true, &mut chain).unwrap();
                assert_eq!(chain.tokens(), wanted.len(), "{pattern}");
                assert_eq!(chain.into_hashes(), hashes, "{pattern}");
            }
        }
    }

    #[test]
    fn expressions_without_a_scanner_use_the_whole_library() {
        let fast = prove(&text(r"\p{L}+|[^\p{L}]+"));
        assert!(matches!(fast.library, FastLibrary::Whole(_)));
    }

    #[test]
    fn a_tokenizer_with_other_ids_than_the_reference_is_refused() {
        let text = text(fastokens::tiktoken::QWEN2_PATTERN);
        let (reference, described) = reference::build(&text).unwrap();
        let mut example = Example::of(&reference, described.unwrap()).unwrap();
        let (_, answers) = example.answers.iter_mut().find(|(text, _)| text.len() > 40).unwrap();
        answers[1].push(7);
        let fast = FastTokenizer::prove(&File::read(&text).unwrap(), &example);
        assert_eq!(fast.err().as_deref(), Some("the ids of a difficult text differ"));
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
