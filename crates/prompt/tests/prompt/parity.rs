//! Prompts are those of a real vLLM: expected renders and token ids from
//! `fixtures/tokenizer/generate.py`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use splitrail_engine::EngineKind;
use splitrail_prompt::template::{ChatTemplate, SpecialTokens};
use splitrail_prompt::{
    ChatRequestView, ContentFormat, PromptError, PromptModel, PromptOptions, Tokenizer,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer")
}

fn read_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(name)).unwrap()).unwrap()
}

fn format_name(format: ContentFormat) -> &'static str {
    match format {
        ContentFormat::String => "string",
        ContentFormat::OpenAi => "openai",
    }
}

/// A copy of the model folder with changed files, as the generator wrote it.
fn model_folder(tokenizer: &Value, config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, changes) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", config)] {
        let mut file = read_json(&format!("model/{name}"));
        for (key, value) in changes.as_object().unwrap() {
            file[key] = value.clone();
        }
        std::fs::write(folder.path().join(name), file.to_string()).unwrap();
    }
    folder
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
        .collect()
}

fn tokenize(
    model: &PromptModel,
    body: &Map<String, Value>,
    now: i64,
) -> Result<(String, Vec<u32>), PromptError> {
    let view = ChatRequestView::from_body(body)?;
    let text = model.render_chat(view.clone(), now)?.text;
    Ok((text, model.tokenize_chat(view, now)?.ids))
}

#[test]
fn chats_render_and_tokenize_as_in_vllm() {
    let golden = read_json("chats.json");
    let now = golden["now_unix_s"].as_i64().unwrap();
    let folder = model_folder(
        &serde_json::json!({}),
        &serde_json::json!({ "bos_token": golden["bos_token"] }),
    );
    let mut models: BTreeMap<&str, PromptModel> = BTreeMap::new();
    for (name, format) in golden["formats"].as_object().unwrap() {
        let source =
            std::fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap();
        let template = ChatTemplate::compile(&source, SpecialTokens::new()).unwrap();
        assert_eq!(format_name(template.content_format), format, "{name}");
        let options = PromptOptions { chat_template: Some(source), ..PromptOptions::default() };
        models.insert(name, PromptModel::load(folder.path(), options).unwrap());
    }
    let mut faults = Vec::new();
    let mut left_to_engine = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let label = format!("{} / {}", case["template"], case["name"]);
        let model = &models[case["template"].as_str().unwrap()];
        let got = tokenize(model, case["body"].as_object().unwrap(), now);
        match (got, case.get("text"), case.get("error")) {
            (Ok((text, tokens)), Some(expected), _) => {
                if text != *expected.as_str().unwrap() {
                    faults.push(format!("{label}:\n got {text:?}\nwant {expected}"));
                } else if tokens != ids(&case["ids"]) {
                    faults.push(format!("{label}: other ids for the same text"));
                }
            }
            (Err(PromptError::Client(message)), None, Some(expected)) => {
                let expected = expected.as_str().unwrap();
                // Messages of templates must be equal; the message for empty conversations is the
                // router's own.
                if message != expected && case["name"] != "no messages" {
                    faults.push(format!("{label}: error {message:?}, want {expected:?}"));
                }
            }
            // The router may refuse what the engine refuses as well.
            (Err(PromptError::Unsupported(_)), None, Some(_)) => {}
            (Err(PromptError::Unsupported(_)), Some(_), _) => {
                left_to_engine.push(label);
            }
            (got, text, error) => {
                faults.push(format!("{label}:\n got {got:?}\nwant {text:?} {error:?}"))
            }
        }
    }
    assert!(faults.is_empty(), "{} differ:\n{}", faults.len(), faults.join("\n"));
    // Lists printed in Python's format, with characters that Python escapes.
    assert_eq!(left_to_engine, ["\"python\" / \"white space\"", "\"python\" / \"two calls\""]);
}

#[test]
fn content_format_is_detected_as_in_vllm() {
    for snippet in read_json("chats.json")["snippets"].as_array().unwrap() {
        let source = snippet["source"].as_str().unwrap();
        let template = ChatTemplate::compile(source, SpecialTokens::new()).unwrap();
        assert_eq!(format_name(template.content_format), snippet["format"], "{source}");
    }
}

#[test]
fn texts_have_the_ids_of_transformers_under_every_set_up() {
    for variant in read_json("encodings.json").as_array().unwrap() {
        let folder = model_folder(&variant["tokenizer"], &variant["config"]);
        let tokenizer = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
        assert_eq!(tokenizer.vocab_size as u64, variant["vocab_size"], "{}", variant["name"]);
        for row in variant["rows"].as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            for (key, add_special_tokens) in [("with", true), ("without", false)] {
                let got = tokenizer.encode(text, add_special_tokens).unwrap();
                assert_eq!(got, ids(&row[key]), "{}: {text:?} {key}", variant["name"]);
            }
        }
    }
}
