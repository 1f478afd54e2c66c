//! Tokenizer classes of transformers 5 that use only vocabulary, merges and post-processor of
//! `tokenizer.json` and define the rest themselves (`models/*/tokenization_*.py`; facts of version
//! 5.19).

use serde_json::{Map, Value, json};

use super::file::File;

/// The pattern by which Qwen 2 and 3 split words, single digits, punctuation and white space.
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pattern of Qwen 3.5, which keeps combining marks with their letters.
const QWEN3_5_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

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

    /// The serialised tokenizer that the class builds, without added tokens. `unk_token` is the
    /// effective unknown token.
    ///
    /// # Errors
    /// The feature of the file that the class does not accept, or whose result is not known.
    pub(super) fn rebuild<'a>(
        self,
        file: &File<'a>,
        config: &Map<String, Value>,
        unk_token: Option<&str>,
    ) -> Result<File<'a>, &'static str> {
        let rest = &file.rest;
        let other = rest["model"].get("type").is_some_and(|kind| kind != "BPE");
        if other || !file.has_object_of_tokens() {
            return Err("a vocabulary that is not BPE");
        }
        if self == Self::Llama && mentions_byte_level(rest) {
            // transformers recognises some of these by the name under which the engine loads them,
            // and then uses the file as it is.
            return Err("a byte-level tokenizer.json");
        }
        let (normalizer, pre_tokenizer) = self.splitting(config);
        let sentencepiece = matches!(self, Self::Llama | Self::Gemma);
        let unknown = (self == Self::Gemma).then_some(unk_token.unwrap_or("None"));
        // GPT-NeoX's class sets a post-processor that adds nothing.
        let post_processor =
            if self == Self::GptNeoX { &Value::Null } else { &rest["post_processor"] };
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

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex })
}

fn mentions_byte_level(file: &Value) -> bool {
    let part = &file["pre_tokenizer"];
    let parts = part["pretokenizers"].as_array().map_or(std::slice::from_ref(part), Vec::as_slice);
    parts.iter().any(|part| part["type"] == "ByteLevel")
}
