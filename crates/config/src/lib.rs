//! The configuration file: read and checked completely, then built.
//!
//! The crate `splitrail_settings` parses the file into a tree in which every value knows its
//! position, and checks it against the JSON Schema of the typed configuration (`model`). `rules`
//! checks what spans several keys. Both report every mistake that they find. Only a tree without
//! mistakes becomes a [`Config`].

use std::path::Path;

use serde_json::Value;
use splitrail_settings::problem::Place;
use splitrail_settings::{endpoint, file, problem, reference, tree};

use file_profiles::ROUTER_PROFILE;
use short_forms::{Hub, KnownIds};

mod addition;
mod config_text;
mod digest;
pub mod engine_tls;
mod file_profiles;
mod flags;
pub mod jwks;
pub mod keys;
pub mod model;
mod parts;
mod rules;
mod scalar;
mod short_forms;
pub mod tls;
mod value;

pub use addition::Addition;
pub use config_text::ConfigText;
pub use flags::Flags;
pub use model::*;
pub use parts::Parts;
pub use scalar::BlockSize;
pub use splitrail_settings::{Problem, Problems, ResolvedSecret, SecretError};

/// A valid configuration, with warnings about it.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// The configuration; its paths have been joined with the file's folder.
    pub config: Config,
    /// Settings that are allowed but probably not intended; sorted by position.
    pub warnings: Vec<Problem>,
    /// What was derived for models that leave keys out, a sentence for each model.
    pub notes: Vec<String>,
    /// The positions of all keys and values in the file.
    source: Source,
}

/// The tree of a checked file, from which later problems take their position.
#[derive(Clone, Debug)]
pub struct Source {
    file: String,
    root: tree::Node,
}

impl LoadedConfig {
    /// The positions of all keys and values in the file.
    pub fn source(&self) -> &Source {
        &self.source
    }
}

impl Source {
    /// A problem with the value at `path`, a sequence of keys and list indices. If the value is
    /// absent, the problem points to the innermost part of the path that exists.
    pub fn problem(&self, path: &[&str], message: String, hint: &str) -> Problem {
        let step = |node, key: &&str| child(node, key).ok_or(node);
        let (Ok(node) | Err(node)) = path.iter().try_fold(&self.root, step);
        let Place { line, column } = node.at;
        Problem { file: self.file.clone(), line, column, message, hint: hint.to_owned() }
    }
}

fn child<'n>(node: &'n tree::Node, key: &str) -> Option<&'n tree::Node> {
    match key.parse::<usize>() {
        Ok(place) => node.items().get(place),
        Err(_) => node.get(key),
    }
}

/// Reads and checks a configuration file for a build with these parts. Relative paths in the file
/// (tokenizers, secrets) start at its folder.
///
/// # Errors
/// All mistakes in the file, each with its position; or that the file cannot be read.
pub fn load(path: &Path, parts: Parts) -> Result<LoadedConfig, Problems> {
    ConfigText::read(path)?.load(parts)
}

/// Like [`load`], for a router that runs with the configuration `running`: addresses in lists keep
/// their ids.
///
/// # Errors
/// As for [`load`].
pub fn load_again(path: &Path, parts: Parts, running: &Config) -> Result<LoadedConfig, Problems> {
    ConfigText::read(path)?.load_with(parts, &KnownIds::of(running))
}

/// Checks the text of a configuration file for a build with all parts. `name` is the file name used
/// in problems; relative paths start at `base_dir`. Accesses the files and environment variables
/// that the text refers to.
///
/// # Errors
/// All mistakes in the text, each with its position.
pub fn parse(name: &str, text: &str, base_dir: &Path) -> Result<LoadedConfig, Problems> {
    parse_for(Parts::ALL, (&Hub::of_process(), &KnownIds::default()), name, text, base_dir)
}

fn parse_for(
    parts: Parts,
    sources: (&Hub, &KnownIds),
    name: &str,
    text: &str,
    base_dir: &Path,
) -> Result<LoadedConfig, Problems> {
    let mut notes = Vec::new();
    let rules = |root: &mut tree::Node, report: &mut problem::ProblemReport| {
        parts.check(root, report);
        let expanded = short_forms::expand(root, base_dir, sources, report);
        notes = expanded.notes;
        rules::check(root, &expanded.places, base_dir, report);
    };
    let checked = file::parse(name, text, &schema(), &ROUTER_PROFILE, rules)?;
    let file::CheckedFile { value: mut config, warnings, root } = checked;
    anchor_paths(&mut config, base_dir);
    let source = Source { file: name.to_owned(), root };
    Ok(LoadedConfig { config, warnings, notes, source })
}

/// Normalises an engine's address, `http://HOST:PORT` or `https://HOST:PORT`, so that equal
/// addresses are equal texts.
///
/// # Errors
/// What is wrong with the address, without the text.
pub fn engine_address(text: &str) -> Result<String, String> {
    endpoint::parse_http(text).map_err(|bad| bad.why)
}

/// Like [`engine_address`], for a server beside an engine, which never uses TLS: `http://HOST:PORT`.
///
/// # Errors
/// What is wrong with the address, without the text.
pub fn http_address(text: &str) -> Result<String, String> {
    endpoint::parse(text, "http").map_err(|bad| bad.why)
}

/// The JSON Schema (2020-12) of a configuration file, with the meaning and the default
/// of every key; unknown keys are not allowed anywhere.
#[must_use]
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Config);
    schema.insert("title".to_owned(), "Splitrail configuration".into());
    schema.to_value()
}

/// All keys of the configuration in a Markdown table: path, type, default, meaning.
/// `[]` stands for each item of a list.
#[must_use]
pub fn reference_markdown() -> String {
    reference::reference_markdown(&schema())
}

/// Joins relative paths with the folder of the file, so that they do not depend on the process's
/// working directory.
fn anchor_paths(config: &mut Config, base_dir: &Path) {
    let files = [
        &mut config.ledger.path,
        &mut config.record.path,
        &mut config.audit.path,
        &mut config.access_log.path,
    ];
    for path in files.into_iter().flatten() {
        *path = base_dir.join(&*path);
    }
    let bound = config.fleet.tokens.iter_mut().map(|bound| &mut bound.token);
    for secret in config.fleet.token.iter_mut().chain(bound).chain(&mut config.cache_salt_key) {
        secret.anchor(base_dir);
    }
    config.listen.anchor(base_dir);
    config.tracing.anchor(base_dir);
    config.auth.iter_mut().for_each(|auth| auth.anchor(base_dir));
    if let Some(tls) = &mut config.fleet.tls {
        let paths = [&mut tls.cert, &mut tls.key].into_iter().chain(&mut tls.client_ca);
        paths.for_each(|path| *path = base_dir.join(&*path));
    }
    if let Quotas::Nats(quotas) = &mut config.quotas {
        quotas.anchor(base_dir);
    }
    for model in &mut config.models {
        if let TokenizerConfig::Huggingface(tokenizer) = &mut model.tokenizer {
            let paths = [&mut tokenizer.path].into_iter().chain(&mut tokenizer.chat_template);
            paths.for_each(|path| *path = base_dir.join(&*path));
        }
        model.engine_api_key.iter_mut().for_each(|secret| secret.anchor(base_dir));
        model.engine_tls.iter_mut().for_each(|tls| tls.anchor(base_dir));
        for source in &mut model.discovery {
            if let Discovery::Kubernetes(KubernetesDiscovery { kubeconfig: Some(path), .. }) =
                source
            {
                *path = base_dir.join(&*path);
            }
        }
    }
}
