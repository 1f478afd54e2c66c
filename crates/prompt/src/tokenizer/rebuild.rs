//! Tokenizer classes of transformers 5 that use only vocabulary, merges and post-processor of
//! `tokenizer.json` and define the rest themselves (`models/*/tokenization_*.py`; facts of version
//! 5.19), and what SGLang changes afterwards (`_apply_post_load_fixes` of
//! `srt/utils/hf_transformers/tokenizer.py`, 0.5.23).

use serde_json::{Map, Value, json};
use splitrail_engine::EngineKind;

use super::file::{File, Text};
use crate::template::SpecialTokens;

/// The pattern by which Qwen 2 and 3 split words, single digits, punctuation and white space.
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pattern of Qwen 3.5, which keeps combining marks with their letters.
const QWEN3_5_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The classes named in the configuration for which SGLang adds the first token to texts.
const SGLANG_ADDS_BOS: [&str; 7] = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "CohereTokenizerFast",
];

/// A tokenizer class that rebuilds the tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Qwen2,
    Qwen3_5,
    Llama,
    Gemma,
    Gpt2,
    GptNeoX,
    Cohere,
}

/// The tokens that a class adds after the configured ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Nothing,
    /// Every special token again, without its flags.
    PlainSpecials,
    /// Every special token again, marked as special.
    MarkedSpecials,
}

impl Family {
    /// The family of a class name without the suffix `Fast`.
    pub(super) fn of_class(name: &str) -> Option<Self> {
        Some(match name {
            "Qwen2Tokenizer" => Self::Qwen2,
            "Qwen3_5Tokenizer" => Self::Qwen3_5,
            "LlamaTokenizer" => Self::Llama,
            "GemmaTokenizer" => Self::Gemma,
            // CodeGen's class differs from GPT-2's only in decoding.
            "GPT2Tokenizer" | "CodeGenTokenizer" => Self::Gpt2,
            "GPTNeoXTokenizer" => Self::GptNeoX,
            "CohereTokenizer" => Self::Cohere,
            _ => return None,
        })
    }

    /// Special tokens that the class assumes if the configuration lacks the key. `None` means that
    /// the class assumes no such token.
    pub(super) fn default_tokens(self) -> &'static [(&'static str, Option<&'static str>)] {
        const END: Option<&str> = Some("<|endoftext|>");
        match self {
            Self::Qwen2 | Self::Qwen3_5 => {
                &[("bos_token", None), ("eos_token", END), ("unk_token", END), ("pad_token", END)]
            }
            Self::Llama => &[
                ("bos_token", Some("<s>")),
                ("eos_token", Some("</s>")),
                ("unk_token", Some("<unk>")),
            ],
            Self::Gemma => &[
                ("bos_token", Some("<bos>")),
                ("eos_token", Some("<eos>")),
                ("unk_token", Some("<unk>")),
                ("pad_token", Some("<pad>")),
                ("mask_token", Some("<mask>")),
            ],
            Self::Gpt2 => {
                &[("bos_token", END), ("eos_token", END), ("unk_token", END), ("pad_token", None)]
            }
            Self::GptNeoX => &[
                ("bos_token", END),
                ("eos_token", END),
                ("unk_token", END),
                ("pad_token", Some("<|padding|>")),
            ],
            Self::Cohere => &[
                ("bos_token", Some("<BOS_TOKEN>")),
                ("eos_token", Some("<|END_OF_TURN_TOKEN|>")),
                ("unk_token", Some("<UNK>")),
                ("sep_token", Some("<SEP>")),
                ("pad_token", Some("<PAD>")),
                ("cls_token", Some("<CLS>")),
                ("mask_token", Some("<MASK_TOKEN>")),
            ],
        }
    }

    pub(super) fn finish(self) -> Finish {
        match self {
            Self::Qwen2 => Finish::PlainSpecials,
            Self::Cohere => Finish::MarkedSpecials,
            _ => Finish::Nothing,
        }
    }

    /// The serialised tokenizer that the engine builds by the class, without added tokens. The named
    /// special tokens are the effective ones.
    ///
    /// # Errors
    /// The feature of the file that the class does not accept, or whose result is not known.
    pub(super) fn rebuild<'a>(
        self,
        file: &File<'a>,
        config: &Map<String, Value>,
        special: &SpecialTokens,
        engine: EngineKind,
    ) -> Result<File<'a>, &'static str> {
        let rest = &file.rest;
        let other = rest["model"].get("type").is_some_and(|kind| kind != "BPE");
        if other || !file.has_object_of_tokens() {
            return Err("a vocabulary that is not BPE");
        }
        if engine == EngineKind::Vllm && self == Self::Llama && mentions_byte_level(rest) {
            // transformers recognises some of these by the name under which the engine loads them,
            // and then uses the file as it is.
            return Err("a byte-level tokenizer.json");
        }
        let (normalizer, mut pre_tokenizer) = self.splitting(config);
        let sentencepiece = matches!(self, Self::Llama | Self::Gemma);
        let text = |name: &str| special.get(name).map(String::as_str);
        let unknown = (self == Self::Gemma).then_some(text("unk_token").unwrap_or("None"));
        // GPT-NeoX's class sets a post-processor that adds nothing.
        let mut post_processor =
            if self == Self::GptNeoX { Value::Null } else { rest["post_processor"].clone() };
        if engine == EngineKind::Sglang {
            let own = &rest["pre_tokenizer"];
            if !own.is_null() && own["type"] != pre_tokenizer["type"] {
                pre_tokenizer = own.clone();
            }
            let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
            if SGLANG_ADDS_BOS.contains(&class)
                && config.get("add_bos_token") != Some(&false.into())
            {
                post_processor = first_token(file, text("bos_token"))?;
            }
        }
        let rest = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor,
            "decoder": rest["decoder"],
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": sentencepiece,
                "byte_fallback": sentencepiece,
                "ignore_merges": false,
            },
        });
        Ok(File { rest, ..file.clone() })
    }

    /// The normalizer and pre-tokenizer of the class.
    fn splitting(self, config: &Map<String, Value>) -> (Value, Value) {
        let space = |default: bool| {
            config.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(default)
        };
        let nfc = json!({ "type": "NFC" });
        let split = |pattern: &str| {
            json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
                byte_level(space(false), false),
            ]})
        };
        match self {
            Self::Qwen2 => (nfc, split(QWEN2_SPLIT)),
            Self::Qwen3_5 => (nfc, split(QWEN3_5_SPLIT)),
            Self::Llama => {
                let legacy = config.get("legacy").and_then(Value::as_bool).unwrap_or(false);
                let scheme = match (space(true), legacy) {
                    (false, _) => "never",
                    (true, true) => "always",
                    (true, false) => "first",
                };
                let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false });
                (Value::Null, metaspace)
            }
            Self::Gemma => (
                json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" }),
                json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false }),
            ),
            Self::Gpt2 => (Value::Null, byte_level(space(false), true)),
            Self::GptNeoX => (nfc, byte_level(space(false), true)),
            Self::Cohere => (
                nfc,
                json!({ "type": "Sequence", "pretokenizers": [
                    { "type": "Digits", "individual_digits": true },
                    byte_level(space(false), true),
                ]}),
            ),
        }
    }
}

/// A post-processor that puts the token, if there is one, before a text.
///
/// # Errors
/// The vocabulary lacks the token, so that its id follows from tokens that are added later.
fn first_token(file: &File<'_>, token: Option<&str>) -> Result<Value, &'static str> {
    let text = json!([{ "Sequence": { "id": "A", "type_id": 0 } }]);
    let Some(token) = token else {
        return Ok(json!({
            "type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": {},
        }));
    };
    let tokens = file.tokens().unwrap_or_default();
    let id = tokens.get(&Text::from(token)).ok_or("a first token that the vocabulary lacks")?;
    let single = json!([{ "SpecialToken": { "id": token, "type_id": 0 } }, text[0]]);
    Ok(json!({
        "type": "TemplateProcessing", "single": single, "pair": single,
        "special_tokens": { token: { "id": token, "ids": [id], "tokens": [token] } },
    }))
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex })
}

fn mentions_byte_level(file: &Value) -> bool {
    let part = &file["pre_tokenizer"];
    let parts = part["pretokenizers"].as_array().map_or(std::slice::from_ref(part), Vec::as_slice);
    parts.iter().any(|part| part["type"] == "ByteLevel")
}
