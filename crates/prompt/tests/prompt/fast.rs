//! The fast tokenizer is used where possible, and its ids are those of the reference.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use splitrail_engine::EngineKind;
use splitrail_kv::{Chain, HashSeed, Namespace};
use splitrail_prompt::Tokenizer;

/// The patterns by which well-known models split text into words.
const LLAMA: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

struct Pair {
    name: &'static str,
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
}

impl Pair {
    /// The fixture's vocabulary with another pattern.
    fn new(name: &'static str, changes: &Value) -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/model");
        let mut file: Value =
            serde_json::from_slice(&std::fs::read(fixture.join("tokenizer.json")).unwrap())
                .unwrap();
        for (key, value) in changes.as_object().unwrap() {
            file[key] = value.clone();
        }
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, value: &Value| {
            std::fs::write(folder.path().join(name), value.to_string()).unwrap();
        };
        write("tokenizer.json", &file);
        write("tokenizer_config.json", &json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
        let ours = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
        let reference =
            tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
        Self { name, ours, reference }
    }

    fn check(&self, text: &str) {
        for special in [false, true] {
            let wanted = self.reference.encode_fast(text, special).unwrap();
            let got = self.ours.encode(text, special).unwrap();
            assert!(got == wanted.get_ids(), "{}: other ids for {text:?}", self.name);
            self.check_chain("a tenant", text, special, wanted.get_ids());
        }
    }

    /// Compares the blocks of a prompt, some of which come from the cache.
    fn check_chain(&self, salt: &str, text: &str, special: bool, wanted: &[u32]) {
        let namespace =
            Namespace { salt: Some(salt), model: self.name, adapter: None, block_size: 16 };
        let [mut all, mut got] = [(); 2].map(|()| Chain::new(&namespace, HashSeed(7)));
        all.append(wanted);
        self.ours.chain(text, special, &mut got).unwrap();
        assert!(
            (got.hashes(), got.rest(), got.tokens()) == (all.hashes(), all.rest(), all.tokens()),
            "{}: other blocks for {text:?}",
            self.name
        );
    }
}

fn pairs() -> Vec<Pair> {
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    let sequence = |splits: &[&str]| {
        let mut steps: Vec<Value> = splits.iter().copied().map(split).collect();
        steps.push(bytes.clone());
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})
    };
    let mut normal = sequence(&[QWEN]);
    normal["normalizer"] = json!({"type": "NFC"});
    vec![
        Pair::new("as GPT-2", &json!({})),
        Pair::new("as Llama 3", &sequence(&[LLAMA])),
        Pair::new("as Qwen", &normal),
        Pair::new("as DeepSeek", &sequence(&DEEPSEEK)),
    ]
}

fn specials() -> Vec<String> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/model/tokenizer.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let added = file["added_tokens"].as_array().unwrap();
    added.iter().map(|token| token["content"].as_str().unwrap().to_owned()).collect()
}

/// Source files and documents of this repository.
fn documents() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths: Vec<PathBuf> = vec![
        root.join("../../README.md"),
        root.join("../../docs/configuration.md"),
        root.join("tests/fixtures/tokenizer/encodings.json"),
        root.join("tests/fixtures/tokenizer/chats.json"),
    ];
    for folder in ["src", "src/tokenizer", "../flow/src", "tests"] {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        paths.extend(entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()));
    }
    paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

#[test]
fn a_large_mixed_corpus_has_the_references_ids() {
    let cjk = "東京都の天気は晴れです。你好，世界！这是一个测试。한국어 문장도 있습니다。ภาษาไทย "
        .repeat(60);
    let emoji = "👩‍👩‍👧 🇩🇪🇫🇷 👍🏽 ❤️ a🙂b🙂🙂 c\u{200d}d ".repeat(80);
    let broken: Vec<u8> =
        (0..40_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let broken = String::from_utf8_lossy(&broken).into_owned();
    let specials = specials();
    for pair in pairs() {
        assert!(pair.ours.is_fast(), "{}", pair.name);
        for text in documents() {
            pair.check(&text);
            // The model's special tokens within text, where a client may write them.
            let mut mixed = String::new();
            for (at, piece) in text.split_inclusive('\n').take(200).enumerate() {
                let token = &specials[at % specials.len()];
                write!(mixed, "{piece}{token} {token}").unwrap();
            }
            pair.check(&mixed);
        }
        for text in [&cjk, &emoji, &broken] {
            pair.check(text);
        }
    }
}

#[test]
fn every_character_below_u32000_has_the_references_ids() {
    let characters: Vec<char> = (0..0x3_2000).filter_map(char::from_u32).collect();
    for pair in pairs() {
        for few in characters.chunks(48) {
            let alone: String = few.iter().flat_map(|c| [*c, ' ']).collect();
            let inside: String =
                few.iter().flat_map(|c| ['a', *c, '1', *c, '\n', *c, *c]).collect();
            pair.check(&alone);
            pair.check(&inside);
        }
    }
}

#[test]
fn a_conversation_has_the_references_ids_turn_after_turn() {
    let documents = documents();
    let specials = specials();
    for pair in pairs() {
        let mut conversation = String::new();
        for (at, text) in documents.iter().take(12).enumerate() {
            let end = (0..=1500.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
            write!(conversation, "{}\n{}", specials[at % specials.len()], &text[..end.unwrap()])
                .unwrap();
            pair.check(&conversation);
        }
    }
}

#[test]
fn cached_pieces_of_other_texts_change_no_ids() {
    let documents = documents();
    let long = documents.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
    let ends = (0..).map(|at| 3000 + at * 1777).take_while(|end| *end < 60_000);
    let starts: Vec<&str> =
        ends.filter(|end| long.is_char_boundary(*end)).map(|end| &long[..end]).collect();
    for pair in pairs() {
        for (at, start) in starts.iter().enumerate() {
            // Ends in the middle of words, numbers and white space, and continues differently.
            let other: String = documents[at % documents.len()].chars().take(400).collect();
            let text = format!("{start}{other}");
            for special in [false, true] {
                let wanted = pair.reference.encode_fast(text.as_str(), special).unwrap();
                for tenant in ["a", "b", "a"] {
                    pair.check_chain(tenant, &text, special, wanted.get_ids());
                }
            }
        }
    }
}

#[test]
fn features_without_a_fast_equivalent_are_left_to_the_reference() {
    let word = json!([{
        "id": 2048, "content": "whole", "single_word": true, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false,
    }]);
    let pair = Pair::new("a token that is a word", &json!({"added_tokens": word}));
    assert!(!pair.ours.is_fast());
    pair.check("whole wholesome unwhole whole.");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_text_has_other_ids(
        pieces in proptest::collection::vec(
            prop_oneof!["\\PC{0,12}", "[ \\t\\r\\n\u{a0}\u{2003}]{0,6}", "[a-zA-Z' ]{0,16}", "[0-9]{0,9}", ".{0,8}"],
            0..24,
        ),
        token in any::<prop::sample::Index>(),
    ) {
        thread_local! {
            static PAIRS: Vec<Pair> = pairs();
        }
        let specials = specials();
        let text = pieces.join(&specials[token.index(specials.len())]) + &pieces.concat();
        // Longer texts are cut into pieces, which are cached; also difficult ones, with words
        // between them.
        let cut = pieces.join(" and so on ").repeat(5000 / (text.len() + 16) + 1);
        PAIRS.with(|pairs| {
            for pair in pairs {
                pair.check(&text);
                pair.check(&cut);
                pair.check(&format!("{cut}{text}"));
            }
        });
    }
}
