//! The files of a Hugging Face model folder that say how text becomes tokens,
//! read by the rules of transformers 5 (what vLLM 0.32 runs).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::LoadError;
use crate::prompt::template::SpecialTokens;

/// Model architectures whose chats vLLM encodes with code of its own instead
/// of a template (`vllm/config/model.py`).
const NATIVE_CHAT: [&str; 9] = [
    "DeepseekV32ForCausalLM",
    "DeepseekV41ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "GptOssForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MoonshotKimiaForCausalLM",
];

/// Everything read from a model folder.
pub(super) struct Files {
    pub(super) tokenizer_path: PathBuf,
    pub(super) tokenizer_json: Vec<u8>,
    /// Tokens that the configuration adds to those of `tokenizer.json`.
    pub(super) added: Vec<tokenizers::AddedToken>,
    pub(super) split_special_tokens: bool,
    pub(super) special: SpecialTokens,
    pub(super) templates: BTreeMap<String, String>,
    /// Why chats of this model cannot be rendered here, if they cannot.
    pub(super) native_chat: Option<&'static str>,
    pub(super) notes: Vec<String>,
}

/// Reads a model folder, or the folder around a `tokenizer.json`.
pub(super) fn read(path: &Path) -> Result<Files, LoadError> {
    let tokenizer_path =
        if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
    let folder = tokenizer_path.parent().unwrap_or(Path::new(".")).to_path_buf();
    let tokenizer_json = std::fs::read(&tokenizer_path).map_err(|error| LoadError {
        path: tokenizer_path.clone(),
        message: error.to_string(),
        hint: "a folder with a tokenizer.json is needed; models that ship only tokenizer.model or \
               tekken.json want `tokenizer: { kind: engine }`",
    })?;
    let mut config = json_object(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    if !config.contains_key("added_tokens_decoder") {
        // Older models keep their special tokens in a file of their own.
        let map = json_object(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
        config.extend(map);
    }
    let special = special_tokens(&config);
    let mut notes = Vec::new();
    for key in ["add_bos_token", "add_eos_token"] {
        if config.contains_key(key) {
            notes.push(format!(
                "tokenizer_config.json sets {key}; as in transformers 5 the post-processor of \
                 tokenizer.json decides (transformers 4 may differ by a first or last token on \
                 text prompts)"
            ));
        }
    }
    Ok(Files {
        added: added_tokens(&config, &special),
        split_special_tokens: config.get("split_special_tokens") == Some(&Value::Bool(true)),
        templates: templates(&folder, &config)?,
        native_chat: native_chat(&folder)?,
        tokenizer_path,
        tokenizer_json,
        special,
        notes,
    })
}

fn json_object(path: &Path) -> Result<Option<Map<String, Value>>, LoadError> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text).map(Some).map_err(|error| LoadError {
        path: path.to_path_buf(),
        message: error.to_string(),
        hint: "the file must hold one JSON object",
    })
}

fn text(path: &Path) -> Result<Option<String>, LoadError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LoadError {
            path: path.to_path_buf(),
            message: error.to_string(),
            hint: "the router must be able to read the model's files",
        }),
    }
}

/// A token as text, or as an object with its `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn special_tokens(config: &Map<String, Value>) -> SpecialTokens {
    let extra = config.get("extra_special_tokens").and_then(Value::as_object);
    config
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .chain(extra.into_iter().flatten())
        .filter_map(|(name, value)| Some((name.clone(), token_text(value)?.to_owned())))
        .collect()
}

/// Tokens that transformers adds to the tokenizer: those of
/// `added_tokens_decoder` by id, then special tokens of other places.
fn added_tokens(
    config: &Map<String, Value>,
    special: &SpecialTokens,
) -> Vec<tokenizers::AddedToken> {
    let mut by_id: BTreeMap<u64, tokenizers::AddedToken> = BTreeMap::new();
    let decoder = config.get("added_tokens_decoder").and_then(Value::as_object);
    for (id, value) in decoder.into_iter().flatten() {
        if let (Ok(id), Some(content)) = (id.parse(), token_text(value)) {
            let flag = |name: &str| value.get(name).and_then(Value::as_bool);
            let special = flag("special").unwrap_or(false);
            let token = tokenizers::AddedToken::from(content, special)
                .single_word(flag("single_word").unwrap_or(false))
                .lstrip(flag("lstrip").unwrap_or(false))
                .rstrip(flag("rstrip").unwrap_or(false))
                .normalized(flag("normalized").unwrap_or(!special));
            by_id.insert(id, token);
        }
    }
    let mut tokens: Vec<tokenizers::AddedToken> = by_id.into_values().collect();
    let lists = ["extra_special_tokens", "additional_special_tokens"];
    let listed = lists
        .iter()
        .find_map(|name| config.get(*name)?.as_array())
        .into_iter()
        .flatten()
        .filter_map(token_text);
    for content in special.values().map(String::as_str).chain(listed) {
        if !tokens.iter().any(|token| token.content == content) {
            tokens.push(tokenizers::AddedToken::from(content, true));
        }
    }
    tokens
}

/// Template files win over templates inside the configuration.
fn templates(
    folder: &Path,
    config: &Map<String, Value>,
) -> Result<BTreeMap<String, String>, LoadError> {
    let mut found = BTreeMap::new();
    if let Some(default) = text(&folder.join("chat_template.jinja"))? {
        found.insert("default".to_owned(), default);
    }
    if let Some(tool_use) = text(&folder.join("additional_chat_templates/tool_use.jinja"))? {
        found.insert("tool_use".to_owned(), tool_use);
    }
    if !found.is_empty() {
        return Ok(found);
    }
    match config.get("chat_template") {
        Some(Value::String(template)) => {
            found.insert("default".to_owned(), template.clone());
        }
        Some(Value::Array(list)) => {
            for entry in list {
                if let (Some(name), Some(template)) =
                    (entry["name"].as_str(), entry["template"].as_str())
                {
                    found.insert(name.to_owned(), template.to_owned());
                }
            }
        }
        _ => {}
    }
    Ok(found)
}

fn native_chat(folder: &Path) -> Result<Option<&'static str>, LoadError> {
    let config = json_object(&folder.join("config.json"))?.unwrap_or_default();
    let native = config
        .get("architectures")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .any(|name| NATIVE_CHAT.contains(&name));
    if native || config.get("model_type").is_some_and(|kind| kind == "gpt_oss") {
        return Ok(Some("the engine encodes this model's chats without a template"));
    }
    if folder.join("tekken.json").exists() && has_consolidated_weights(folder) {
        return Ok(Some("the engine uses the tokenizer in Mistral's own format"));
    }
    // A processor's template is the engine's first choice for multi-modal models.
    for name in ["chat_template.json", "processor_config.json"] {
        let file = json_object(&folder.join(name))?.unwrap_or_default();
        if file.contains_key("chat_template") {
            return Ok(Some("the engine may use the chat template of the model's processor"));
        }
    }
    Ok(None)
}

fn has_consolidated_weights(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return false;
    };
    entries.filter_map(Result::ok).any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("consolidated") && name.ends_with(".safetensors")
    })
}
