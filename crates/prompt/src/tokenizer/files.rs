//! The files of a Hugging Face model folder that say how text becomes tokens,
//! read by the rules of transformers 5 (what vLLM 0.32 runs).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::load_error::LoadError;

/// Model architectures for which vLLM encodes chats by code instead of a template
/// (`vllm/config/model.py`).
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
    pub(super) folder: PathBuf,
    pub(super) tokenizer_json: Vec<u8>,
    /// `tokenizer_config.json`
    pub(super) config: Map<String, Value>,
    /// `special_tokens_map.json`
    pub(super) special_map: Map<String, Value>,
    /// `added_tokens.json`
    pub(super) added: Map<String, Value>,
    /// `config.json`, if it exists.
    pub(super) model: Option<Map<String, Value>>,
    pub(super) templates: BTreeMap<String, String>,
    /// Why the router cannot render chats of this model; `None` if it can.
    pub(super) native_chat: Option<&'static str>,
    pub(super) notes: Vec<String>,
}

impl Files {
    /// The chunk of the model's chunked local attention in tokens.
    pub(super) fn attention_chunk_tokens(&self) -> Option<u32> {
        attention_chunk_tokens(self.model.as_ref()?)
    }
}

fn attention_chunk_tokens(model: &Map<String, Value>) -> Option<u32> {
    // Models that read images have the language model's configuration in a part of their own.
    let text = model.get("text_config").and_then(Value::as_object).unwrap_or(model);
    let tokens = u32::try_from(text.get("attention_chunk_size")?.as_u64()?).ok()?;
    (tokens > 0).then_some(tokens)
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
               tekken.json want `tokenizer: { kind: none }`",
    })?;
    let config = json_object(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let model = json_object(&folder.join("config.json"))?;
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
        special_map: json_object(&folder.join("special_tokens_map.json"))?.unwrap_or_default(),
        added: json_object(&folder.join("added_tokens.json"))?.unwrap_or_default(),
        templates: templates(&folder, &config)?,
        native_chat: native_chat(&folder, model.as_ref())?,
        tokenizer_path,
        folder,
        tokenizer_json,
        config,
        model,
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

/// Template files replace templates inside the configuration.
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

fn native_chat(
    folder: &Path,
    model: Option<&Map<String, Value>>,
) -> Result<Option<&'static str>, LoadError> {
    let native = model
        .and_then(|model| model.get("architectures")?.as_array())
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .any(|name| NATIVE_CHAT.contains(&name));
    let kind = model.and_then(|model| model.get("model_type"));
    if native || kind.is_some_and(|kind| kind == "gpt_oss") {
        return Ok(Some("the engine encodes this model's chats without a template"));
    }
    // For multi-modal models, the engine prefers the template of the processor.
    for name in ["chat_template.json", "processor_config.json"] {
        let file = json_object(&folder.join(name))?.unwrap_or_default();
        if file.contains_key("chat_template") {
            return Ok(Some("the engine may use the chat template of the model's processor"));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_is_that_of_the_language_model() {
        let chunk = |config: Value| config.as_object().and_then(attention_chunk_tokens);
        let of = |tokens: i64| serde_json::json!({"attention_chunk_size": tokens});
        assert_eq!([128, 0, -1].map(of).map(chunk), [Some(128), None, None]);
        assert_eq!(
            chunk(serde_json::json!({"text_config": of(64), "model_type": "llama4"})),
            Some(64)
        );
        assert_eq!(chunk(serde_json::json!({})), None);
    }
}
