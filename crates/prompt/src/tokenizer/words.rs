//! Byte-pair encoding of words with a few megabytes of memory, which all threads share.
//!
//! A word is first looked up whole, because most words are one token. Other words are merged pair
//! by pair: the pair with the lowest rank first, and of equal pairs the leftmost, as in the
//! reference. Each thread caches the words that it merged recently (`recent`).

mod merges;
mod recent;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use super::file::{File, Text};
use super::scanner::EndBits;
use merges::Merges;
use recent::{NUMBERS, RecentWords, SHORT_TOKENS, Word};

thread_local! {
    /// Most threads never encode words.
    static RECENT: RefCell<Option<RecentWords>> = const { RefCell::new(None) };
}

/// Maximum number of words that are looked up together, so that memory accesses overlap.
const BATCH_WORDS: usize = 128;

/// Numbers vocabularies, so that a thread's cache does not mix them.
static NEXT_NUMBER: AtomicU32 = AtomicU32::new(1);

/// Encodes words as tokens.
pub(super) struct WordEncoder {
    number: u32,
    merges: Merges,
    whole: SingleTokenWords,
}

impl WordEncoder {
    /// Reads the model of a file.
    ///
    /// # Errors
    /// The feature of the model that is not supported here.
    pub(super) fn read(file: &File<'_>) -> Result<Self, &'static str> {
        let model = &file.rest["model"];
        let absent = |name: &str| model[name].is_null() || model[name] == "";
        if model["type"] != "BPE" || !model["dropout"].is_null() {
            return Err("a model that is not plain BPE");
        }
        if !absent("continuing_subword_prefix") || !absent("end_of_word_suffix") {
            return Err("a model with a prefix or suffix for parts of words");
        }
        let tokens = file.tokens().ok_or("a vocabulary that cannot be read")?;
        let pairs = file.pairs().ok_or("merges that cannot be read")?;
        if tokens.values().any(|id| *id == u32::MAX) {
            return Err("a token with the largest of all ids");
        }
        let mut of_byte = [None; 256];
        for (character, byte) in &*BYTES {
            let mut buffer = [0; 4];
            let text = Text::from(&*character.encode_utf8(&mut buffer));
            of_byte[usize::from(*byte)] = tokens.get(&text).copied();
        }
        if of_byte.contains(&None) {
            return Err("bytes that are not tokens");
        }
        let merges = Merges::new(of_byte.map(Option::unwrap_or_default), &tokens, pairs)?;
        let always = model["ignore_merges"] == true;
        let whole = SingleTokenWords::new(tokens, |word, id| always || merges.make(word, id));
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed) % NUMBERS;
        Ok(Self { number: number.max(1), merges, whole })
    }

    /// Appends the tokens of a text, given the ends of its consecutive words. `None` if the words
    /// do not cover the whole text.
    pub(super) fn append(
        &self,
        text: &str,
        words: impl Iterator<Item = EndBits>,
        ids: &mut Vec<u32>,
    ) -> Option<()> {
        let text = text.as_bytes();
        RECENT.with_borrow_mut(|recent| {
            if recent.is_none() {
                *recent = RecentWords::new();
            }
            let recent = recent.as_mut()?;
            let (mut found, mut count) = ([Word::default(); BATCH_WORDS], 0);
            let mut ended = 0;
            for ends in words {
                if count > BATCH_WORDS - u64::BITS as usize {
                    self.look_up(recent, text, &found[..count], ids);
                    count = 0;
                }
                for end in ends {
                    let word = Word::new(self.number, text, ended, end)?;
                    recent.prefetch(&word);
                    found[count] = word;
                    (ended, count) = (end, count + 1);
                }
            }
            self.look_up(recent, text, &found[..count], ids);
            (ended as usize == text.len()).then_some(())
        })
    }

    #[inline(never)]
    fn look_up(&self, recent: &mut RecentWords, text: &[u8], words: &[Word], ids: &mut Vec<u32>) {
        // Resizes for the maximum, and overwrites: checking the capacity for each word would be
        // slower.
        let mut len = ids.len();
        ids.resize(len + words.len() * SHORT_TOKENS, 0);
        for (at, word) in words.iter().enumerate() {
            if let Some((short, count)) = recent.short(self.number, word) {
                ids[len..len + SHORT_TOKENS].copy_from_slice(short);
                len += count;
                continue;
            }
            ids.truncate(len);
            self.make(recent, word, word.bytes(text), ids);
            len = ids.len();
            ids.resize(len + (words.len() - at - 1) * SHORT_TOKENS, 0);
        }
        ids.truncate(len);
    }

    #[inline(never)]
    fn make(&self, recent: &mut RecentWords, word: &Word, bytes: &[u8], ids: &mut Vec<u32>) {
        if let Some(long) = recent.long(self.number, word, bytes) {
            ids.extend_from_slice(long);
            return;
        }
        let had = ids.len();
        match self.whole.get(bytes) {
            Some(id) => ids.push(id),
            None => self.merges.append(bytes, ids),
        }
        recent.keep(self.number, word, bytes, &ids[had..]);
    }
}

/// The words that are a single token.
struct SingleTokenWords {
    /// All words, one after the other.
    text: Vec<u8>,
    /// The start of each word in `text`, and its token; the last entry only marks the end.
    words: Vec<(u32, u32)>,
    /// A hash table: the word's index plus one; 0 is empty.
    slots: Box<[u32]>,
}

impl SingleTokenWords {
    /// The words for which `holds` is true.
    fn new(tokens: HashMap<Text<'_>, u32>, holds: impl Fn(&[u8], u32) -> bool) -> Self {
        let (mut text, mut words) = (Vec::new(), Vec::new());
        for (token, id) in tokens {
            if let Some(word) = bytes(&token.0).filter(|word| !word.is_empty() && holds(word, id)) {
                words.push((text.len() as u32, id));
                text.extend(word);
            }
        }
        words.push((text.len() as u32, 0));
        text.shrink_to_fit();
        words.shrink_to_fit();
        let mut whole =
            Self { slots: vec![0; (words.len() * 2).next_power_of_two()].into(), text, words };
        for at in 0..whole.words.len() - 1 {
            let slot = whole.slot(whole.word(at));
            whole.slots[slot] = at as u32 + 1;
        }
        whole
    }

    fn word(&self, at: usize) -> &[u8] {
        &self.text[self.words[at].0 as usize..self.words[at + 1].0 as usize]
    }

    /// The slot of a word, or the empty slot where it would be.
    fn slot(&self, word: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = xxh3_64(word) as usize & mask;
        // At least half of the slots are empty.
        while self.slots[slot] != 0 && self.word(self.slots[slot] as usize - 1) != word {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn get(&self, word: &[u8]) -> Option<u32> {
        let at = self.slots[self.slot(word)].checked_sub(1)?;
        Some(self.words[at as usize].1)
    }
}

/// Vocabularies write bytes as visible characters: visible bytes as themselves, the others in order
/// from U+0100 on.
static BYTES: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let is_seen = |byte: &u8| matches!(*byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    let seen = (0..=u8::MAX).filter(is_seen).map(|byte| (char::from(byte), byte));
    let unseen = (0..=u8::MAX).filter(|byte| !is_seen(byte));
    seen.chain(('\u{100}'..).zip(unseen)).collect()
});

/// The bytes that a token of the vocabulary stands for; `None` for special tokens.
fn bytes(token: &str) -> Option<Vec<u8>> {
    token.chars().map(|character| BYTES.get(&character).copied()).collect()
}

/// The text that a token of the vocabulary stands for, if it is valid UTF-8.
pub(super) fn spelled(token: &str) -> Option<String> {
    String::from_utf8(bytes(token)?).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};
    use tokenizers::Model;
    use tokenizers::models::bpe::BPE;

    use super::*;

    /// Pseudo-random numbers that are the same in every run.
    struct PseudoRandom(u64);

    impl PseudoRandom {
        fn below(&mut self, count: usize) -> usize {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (self.0 >> 33) as usize % count
        }
    }

    /// A model of few letters with many merges, some of which have the same product.
    fn model(random: &mut PseudoRandom, ignore_merges: bool) -> Value {
        let mut tokens: Vec<String> = BYTES.keys().map(char::to_string).collect();
        tokens.sort();
        let mut parts: Vec<String> = ["a", "b", "c", "Ġ"].map(str::to_owned).to_vec();
        let mut merges: Vec<[String; 2]> = Vec::new();
        while merges.len() < 300 {
            let pair = [(); 2].map(|()| parts[random.below(parts.len())].clone());
            if merges.contains(&pair) || pair.concat().len() > 24 {
                continue;
            }
            if !tokens.contains(&pair.concat()) {
                tokens.push(pair.concat());
                parts.push(pair.concat());
            }
            merges.push(pair);
        }
        // No merge produces this token.
        tokens.push("abcabcaaab".to_owned());
        let vocab: serde_json::Map<String, Value> =
            tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
        json!({"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges})
    }

    fn read(model: &Value) -> Result<WordEncoder, &'static str> {
        WordEncoder::read(&File::read(json!({ "model": model }).to_string().as_bytes()).unwrap())
    }

    /// Ends of words, one at a time.
    fn each(ends: &[usize]) -> impl Iterator<Item = EndBits> {
        ends.iter().map(|end| EndBits { from: *end as u32, bits: 1 })
    }

    #[test]
    fn words_have_the_tokens_of_the_reference() {
        let mut random = PseudoRandom(0x5eed);
        for ignore_merges in [false, true].repeat(4) {
            let model = model(&mut random, ignore_merges);
            let reference: BPE = serde_json::from_str(&model.to_string()).unwrap();
            let words = read(&model).unwrap();
            for turn in 0..600 {
                let len = 1 + random.below([6, 16, 70, 300][turn % 4]);
                let mut word: String =
                    (0..len).map(|_| ["a", "b", "c", "Ġ"][random.below(4)]).collect();
                if turn == 5 {
                    word = "abcabcaaab".to_owned();
                }
                let wanted: Vec<u32> =
                    reference.tokenize(&word).unwrap().iter().map(|token| token.id).collect();
                let text = spelled(&word).unwrap();
                // The second result comes from the cache; at the end of a text and before more
                // text.
                for around in ["", "", "ccc"] {
                    let mut ids = Vec::new();
                    let all = format!("{text}{around}");
                    let ends = [text.len(), all.len()];
                    let ends = &ends[..1 + usize::from(!around.is_empty())];
                    words.append(&all, each(ends), &mut ids).unwrap();
                    assert_eq!(ids[..wanted.len()], wanted, "{word}");
                }
            }
        }
    }

    #[test]
    fn cached_words_belong_to_one_vocabulary() {
        let mut random = PseudoRandom(7);
        let models = [(); 2].map(|()| model(&mut random, false));
        for _ in 0..2 {
            for model in &models {
                let reference: BPE = serde_json::from_str(&model.to_string()).unwrap();
                let words = read(model).unwrap();
                for word in ["abcab", "abcabcabcabcabcabcabcabc"] {
                    let mut ids = Vec::new();
                    words.append(word, each(&[word.len()]), &mut ids).unwrap();
                    let wanted = reference.tokenize(word).unwrap();
                    assert_eq!(ids, wanted.iter().map(|token| token.id).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn a_text_with_gaps_between_words_is_refused() {
        let words = read(&model(&mut PseudoRandom(1), false)).unwrap();
        for ends in [&[1][..], &[2], &[0, 3], &[2, 2, 3], &[2, 1, 3], &[4], &[]] {
            assert_eq!(words.append("abc", each(ends), &mut Vec::new()), None, "{ends:?}");
        }
        assert_eq!(words.append("abc", each(&[1, 3]), &mut Vec::new()), Some(()));
        assert_eq!(words.append("", each(&[]), &mut Vec::new()), Some(()));
    }

    #[test]
    fn other_models_are_refused() {
        let model = model(&mut PseudoRandom(1), false);
        for (field, value) in [
            ("type", json!("WordPiece")),
            ("dropout", json!(0.1)),
            ("continuing_subword_prefix", json!("##")),
            ("end_of_word_suffix", json!("</w>")),
            ("merges", json!(["a zz"])),
            ("vocab", json!({"a": 0})),
        ] {
            let mut other = model.clone();
            other[field] = value;
            assert!(read(&other).is_err(), "{field}");
        }
    }
}
