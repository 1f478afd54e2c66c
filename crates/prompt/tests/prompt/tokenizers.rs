//! The router's tokenizer of a model folder is the one that the engine builds from it: expected ids
//! from `fixtures/tokenizer/generate.py`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use splitrail_engine::EngineKind;
use splitrail_prompt::tokenizer::TokenizeError;
use splitrail_prompt::{PromptError, PromptModel, PromptOptions, Tokenizer};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer")
}

fn read_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixtures().join(name)).unwrap()).unwrap()
}

/// A model folder: a changed `tokenizer.json` and other files.
fn folder(base: &str, tokenizer: &Value, files: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut file = read_json(&format!("{base}/tokenizer.json"));
    for (key, value) in tokenizer.as_object().unwrap() {
        file[key] = value.clone();
    }
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    for (name, content) in files.as_object().unwrap() {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
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

#[test]
fn every_class_that_an_engine_chooses_has_its_ids() {
    let golden = read_json("models.json");
    let texts = golden["texts"].as_array().unwrap();
    let mut faults = Vec::new();
    for model in golden["models"].as_array().unwrap() {
        let folder = folder(model["base"].as_str().unwrap(), &model["tokenizer"], &model["files"]);
        let tokenizer = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
        let name = model["name"].as_str().unwrap();
        assert_eq!(tokenizer.unsupported, None, "{name}: {:?}", tokenizer.notes);
        assert_eq!(tokenizer.vocab_size as u64, model["vocab_size"], "{name}");
        assert_eq!(json!(tokenizer.special), model["special"], "{name}");
        for (text, row) in texts.iter().zip(model["ids"].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            let expected = row.as_array().unwrap();
            for (add_special_tokens, want) in
                [(false, &expected[0]), (true, expected.last().unwrap())]
            {
                let got = tokenizer.encode(text, add_special_tokens).unwrap();
                if got != ids(want) {
                    faults.push(format!(
                        "{name}: {text:?} {add_special_tokens}\n got {got:?}\nwant {want}"
                    ));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{} differ:\n{}", faults.len(), faults.join("\n"));
}

/// Golden ids of a model: for each text those without and those with special tokens, which are left
/// out where they are the same.
fn assert_ids(tokenizer: &Tokenizer, name: &str, texts: &[Value], rows: &[Value]) {
    assert_eq!(tokenizer.unsupported, None, "{name}: {:?}", tokenizer.notes);
    for (text, row) in texts.iter().zip(rows) {
        let text = text.as_str().unwrap();
        let row = row.as_array().unwrap();
        for (special, want) in [(false, &row[0]), (true, row.last().unwrap())] {
            let got = tokenizer.encode(text, special).unwrap();
            assert_eq!(got, ids(want), "{name}: {text:?} {special}");
        }
    }
}

#[test]
fn sglang_puts_parts_of_the_file_back_and_vllm_does_not() {
    let (golden, sglang) = (read_json("models.json"), read_json("sglang.json"));
    let texts = golden["texts"].as_array().unwrap();
    let load = |model: &Value| {
        let base = model["base"].as_str().unwrap();
        let folder = folder(base, &model["tokenizer"], &model["files"]);
        Tokenizer::load(folder.path(), EngineKind::Sglang).unwrap()
    };
    for model in golden["models"].as_array().unwrap() {
        let name = model["name"].as_str().unwrap();
        let mut rows = model["ids"].as_array().unwrap().clone();
        for differs in sglang["differ"][name].as_array().unwrap() {
            rows[differs[0].as_u64().unwrap() as usize] = differs[1].clone();
        }
        assert_ids(&load(model), name, texts, &rows);
    }
    for model in sglang["more"].as_array().unwrap() {
        let name = model["name"].as_str().unwrap();
        assert_ids(&load(model), name, texts, model["ids"].as_array().unwrap());
    }
}

#[test]
fn tokenizer_json_alone_is_not_what_the_engine_uses() {
    let golden = read_json("models.json");
    let plain = &golden["models"][0];
    let folder = folder("model", &json!({}), &plain["files"]);
    let engine = Tokenizer::load(folder.path(), EngineKind::Vllm).unwrap();
    assert!(engine.notes.iter().any(|note| note.contains("Qwen2")), "{:?}", engine.notes);
    let file = tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
    let of_file = file.encode("85", false).unwrap().get_ids().to_vec();
    assert_eq!((of_file.len(), engine.encode("85", false).unwrap().len()), (1, 2));
}

/// Loads a folder with these files, and returns the reason for which its tokenizer is refused.
fn refusal(base: &str, tokenizer: &Value, files: &Value, more: &[&str]) -> Option<String> {
    let folder = folder(base, tokenizer, files);
    for name in more {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let model = PromptModel::load(folder.path(), PromptOptions::default()).unwrap();
    let text = model.tokenize_text("85", true);
    if model.tokenizer.unsupported.is_none() {
        assert!(text.is_ok());
        return None;
    }
    assert!(matches!(text, Err(PromptError::Unsupported(_))), "{text:?}");
    let encoded = model.tokenizer.encode("85", false);
    assert!(matches!(encoded, Err(TokenizeError::Unsupported(_))), "{encoded:?}");
    let notes: Vec<&String> =
        model.notes.iter().filter(|note| note.contains("not reproduced")).collect();
    assert_eq!(notes.len(), 1, "{:?}", model.notes);
    assert!(!notes[0].contains('\n'));
    Some(notes[0].clone())
}

#[test]
#[allow(clippy::too_many_lines)] // One table of cases.
fn tokenizers_that_the_engine_builds_differently_are_refused_and_named() {
    let class = |class: &str| json!({ "tokenizer_class": class });
    let files = |config: Value, model: Value| json!({ "tokenizer_config.json": config, "config.json": model });
    let llama = json!({ "model_type": "llama" });
    let mistral = json!({ "model_type": "mistral", "transformers_version": "4.57.0" });
    let fast = class("PreTrainedTokenizerFast");
    let none = json!({});
    let unigram = json!({ "model": { "type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]] }, "added_tokens": [] });
    for (what, tokenizer, files, more) in [
        ("T5Tokenizer", &none, files(class("T5TokenizerFast"), llama.clone()), &[][..]),
        ("NewTokenizer", &none, files(class("NewTokenizer"), llama.clone()), &[]),
        ("a class of its own", &none, files(json!({}), json!({ "model_type": "whisper" })), &[]),
        ("byte-level", &none, files(class("LlamaTokenizerFast"), llama.clone()), &[]),
        ("not BPE", &unigram, files(class("GemmaTokenizer"), llama.clone()), &[]),
        ("model_type", &none, files(fast.clone(), json!({ "hidden_size": 8 })), &[]),
        (
            "model_name",
            &none,
            files(fast.clone(), json!({ "model_type": "gemma", "model_name": "chatlm" })),
            &[],
        ),
        (
            "auto_map",
            &none,
            files(json!({ "auto_map": { "AutoTokenizer": ["a.B", null] } }), llama.clone()),
            &[],
        ),
        (
            "fix_mistral_regex",
            &none,
            files(json!({ "fix_mistral_regex": true }), mistral.clone()),
            &[],
        ),
        (
            "several",
            &none,
            files(json!({ "fast_tokenizer_files": ["tokenizer.4.0.0.json"] }), llama.clone()),
            &[],
        ),
        (
            "Mistral's own",
            &none,
            files(fast.clone(), mistral.clone()),
            &["tekken.json", "consolidated.safetensors"],
        ),
        (
            "Kimi-Audio",
            &none,
            files(
                fast.clone(),
                json!({ "model_type": "kimi_audio", "architectures": ["MoonshotKimiaForCausalLM"] }),
            ),
            &[],
        ),
    ] {
        let note =
            refusal("model", tokenizer, &files, more).unwrap_or_else(|| panic!("{what}: served"));
        assert!(note.contains(what), "{what}: {note}");
    }
    for (files, more) in [
        (files(fast.clone(), mistral), &["tekken.json"][..]),
        (files(class("TikTokenTokenizer"), json!({ "model_type": "internlm2" })), &[]),
        (
            files(
                class("LlamaTokenizer"),
                json!({ "model_type": "x", "architectures": ["DeepseekV32ForCausalLM"] }),
            ),
            &[],
        ),
        (
            files(
                json!({ "fix_mistral_regex": true }),
                json!({ "model_type": "mistral", "transformers_version": "5.0.0" }),
            ),
            &[],
        ),
        (files(json!({ "auto_map": { "AutoProcessor": "a.B" } }), llama), &[]),
    ] {
        assert_eq!(refusal("model", &none, &files, more), None, "{files}");
    }
}

#[test]
fn a_missing_config_json_is_reported() {
    let alone = folder("model", &json!({}), &json!({}));
    let tokenizer = Tokenizer::load(alone.path(), EngineKind::Vllm).unwrap();
    assert!(tokenizer.notes.iter().any(|note| note.contains("config.json")));
    let file = tokenizers::Tokenizer::from_file(alone.path().join("tokenizer.json")).unwrap();
    assert_eq!(
        tokenizer.encode("85 \u{212b}", true).unwrap(),
        file.encode("85 \u{212b}", true).unwrap().get_ids()
    );
}

#[test]
fn the_class_changes_the_fingerprint() {
    let load = |model_type: &str| {
        let files = json!({ "config.json": { "model_type": model_type } });
        Tokenizer::load(folder("model", &json!({}), &files).path(), EngineKind::Vllm)
            .unwrap()
            .fingerprint
    };
    assert_eq!(load("qwen2"), load("qwen3"));
    assert_ne!(load("qwen2"), load("qwen3_5"));
    assert_ne!(load("qwen2"), load("llama"));
}
