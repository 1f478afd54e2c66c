//! Rules about a model's tokenizer and chat template.

use std::path::Path;

use crate::model::{Connector, Engine, TokenizerConfig};
use crate::value::typed;
use splitrail_engine::EngineKind;
use splitrail_engine::template_kwargs::is_control_kwarg;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;
use splitrail_settings::words::shown;

pub(super) fn check(model: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let node = model.get("tokenizer").unwrap_or(model);
    let tokenizer = match typed::<TokenizerConfig>(model, "tokenizer") {
        Some(TokenizerConfig::Huggingface(tokenizer)) => tokenizer,
        Some(TokenizerConfig::Engine(_)) => {
            let written = typed::<Engine>(model, "engine").map(EngineKind::from);
            let implied = || typed::<Connector>(model, "connector").and_then(Connector::engine);
            let engine = written.or_else(implied).unwrap_or_default();
            if !engine.tokenizes_prompts() {
                let message = format!("`{path}.tokenizer: engine` is not possible with SGLang");
                let hint = "the router asks vLLM alone for tokens: write the model's folder, or its \
                            id if it is in the Hugging Face cache of this host";
                report.error(node.at, message, hint);
            }
            return;
        }
        Some(TokenizerConfig::None {}) | None => return,
    };
    let at = |key: &str| node.get(key).unwrap_or(node).at;
    let place = base_dir.join(&tokenizer.path);
    let named = shown(&tokenizer.path.display().to_string());
    let hint = "the model's folder with `tokenizer.json`, or that file; \
                relative paths start at the configuration's folder";
    if tokenizer.path.as_os_str().is_empty() || !place.exists() {
        let message = format!("`{path}.tokenizer.path` \"{named}\" does not exist");
        report.error(at("path"), message, hint);
    } else if place.is_dir() && !place.join("tokenizer.json").is_file() {
        let message = format!("`{path}.tokenizer.path` \"{named}\" has no `tokenizer.json`");
        report.error(at("path"), message, hint);
    }
    if let Some(template) = &tokenizer.chat_template {
        let place = base_dir.join(template);
        if template.as_os_str().is_empty() || !place.is_file() {
            let named = shown(&template.display().to_string());
            let message =
                format!("`{path}.tokenizer.chat_template` \"{named}\" is not a file that exists");
            let hint = "the file that the engines have as `--chat-template`; \
                        relative paths start at the configuration's folder";
            report.error(at("chat_template"), message, hint);
        }
    }
    let key = "default_chat_template_kwargs";
    for entry in node.get(key).map(Node::entries).unwrap_or_default() {
        if is_control_kwarg(&entry.key) {
            let name = shown(&entry.key);
            let message = format!("`{path}.tokenizer.{key}.{name}` is not a template's variable");
            report.error(entry.key_at, message, "engines refuse or overwrite it: delete it");
        }
    }
}
