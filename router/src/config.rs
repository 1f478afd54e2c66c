//! The configuration file: read whole, checked whole, then built.
//!
//! A file becomes a tree in which every value knows its place (`tree`). The tree is
//! held against the JSON Schema of the typed configuration (`check`) and against the
//! rules that span several keys (`rules`); both report everything they find. Only a
//! tree without a mistake becomes a [`Config`].

use std::fs::File;
use std::io::Read;
use std::path::Path;

mod check;
mod endpoint;
pub mod model;
mod problem;
mod reference;
mod rules;
mod scalar;
mod schema;
mod secret;
mod tree;
mod words;

pub use model::*;
pub use problem::{Problem, Problems};
pub use reference::reference_markdown;
pub use scalar::BlockSize;
pub use schema::schema;
pub use secret::{ResolvedSecret, SecretError};

use problem::{Place, Report};

/// A configuration file is no longer than this; a fleet of 10,000 workers is about 2 MB.
const FILE_MAX_BYTES: usize = 4 << 20;

/// A configuration that can be run, and what its author may want to know about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration; its paths are no longer relative to the file's folder.
    pub config: Config,
    /// Allowed, but perhaps not meant; sorted by place.
    pub warnings: Vec<Problem>,
}

/// Reads and checks a configuration file. Relative paths in it (tokenizers, secrets)
/// start at its folder.
///
/// # Errors
/// Every mistake of the file, each with its place; or that it cannot be read.
pub fn load(path: &Path) -> Result<Loaded, Problems> {
    let name = path.display().to_string();
    let text = read(path, &name)?;
    parse(&name, &text, path.parent().unwrap_or(Path::new("")))
}

/// Checks the text of a configuration file. `name` stands for the file in problems;
/// relative paths start at `base_dir`. Looks at the file system and the environment
/// for what the text refers to.
///
/// # Errors
/// Every mistake of the text, each with its place.
pub fn parse(name: &str, text: &str, base_dir: &Path) -> Result<Loaded, Problems> {
    let mut report = Report::new(name);
    if text.len() > FILE_MAX_BYTES {
        too_large(&mut report);
        return Err(report.into_problems());
    }
    let Some(root) = tree::read(text, &mut report) else {
        return Err(report.into_problems());
    };
    check::check(&root, &schema(), &mut report);
    rules::check(&root, base_dir, &mut report);
    if report.has_errors() {
        return Err(report.into_problems());
    }
    match serde_json::from_value::<Config>(root.to_json()) {
        Ok(mut config) => {
            anchor_paths(&mut config, base_dir);
            Ok(Loaded { config, warnings: report.into_warnings() })
        }
        Err(error) => {
            let hint = "this mistake should have been found with its place: please report it";
            report.error(root.at, format!("the configuration is not valid: {error}"), hint);
            Err(report.into_problems())
        }
    }
}

/// An engine's address, `http://HOST:PORT`, in a form in which equal ones are equal texts.
///
/// # Errors
/// What is wrong with it, without the text.
pub fn http_address(text: &str) -> Result<String, String> {
    endpoint::parse(text, "http").map_err(|(why, _)| why)
}

fn read(path: &Path, name: &str) -> Result<String, Problems> {
    let mut report = Report::new(name);
    let mut bytes = Vec::new();
    let read = File::open(path)
        .and_then(|file| file.take(FILE_MAX_BYTES as u64 + 1).read_to_end(&mut bytes));
    if let Err(error) = read {
        let hint = "name a readable YAML file";
        report.error(Place::START, format!("the file cannot be read: {error}"), hint);
        return Err(report.into_problems());
    }
    if bytes.len() > FILE_MAX_BYTES {
        too_large(&mut report);
        return Err(report.into_problems());
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let before = String::from_utf8_lossy(&error.as_bytes()[..valid]);
        let hint = "save the file as UTF-8";
        report.error(Place::after(&before), "here is a byte that is not UTF-8".to_owned(), hint);
        report.into_problems()
    })
}

fn too_large(report: &mut Report) {
    let message = format!("the file is larger than {FILE_MAX_BYTES} bytes");
    report.error(Place::START, message, "split the fleet over several routers");
}

/// Makes the paths independent of where the process runs.
fn anchor_paths(config: &mut Config, base_dir: &Path) {
    if let Some(path) = &mut config.ledger.path {
        *path = base_dir.join(&*path);
    }
    if let Some(Secret::File { path }) = &mut config.fleet.token {
        *path = base_dir.join(&*path);
    }
    if let Some(tls) = &mut config.fleet.tls {
        let paths = [&mut tls.cert, &mut tls.key].into_iter().chain(&mut tls.client_ca);
        paths.for_each(|path| *path = base_dir.join(&*path));
    }
    for model in &mut config.models {
        if let TokenizerConfig::Huggingface { path } = &mut model.tokenizer {
            *path = base_dir.join(&*path);
        }
        if let Some(Secret::File { path }) = &mut model.engine_api_key {
            *path = base_dir.join(&*path);
        }
    }
}
