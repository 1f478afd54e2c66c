//! The shim's configuration: from a file, or from the command line.
//!
//! Both are held against one schema and one set of rules; every mistake is reported at once.
//! Addresses are checked here, so that nothing that follows has to.

use std::path::Path;

use serde_json::{Map, Value};
use splitrail_settings::problem::Report;
use splitrail_settings::tree::Node;
use splitrail_settings::{Dialect, Problem, Problems, file, reference};

pub mod model;
mod rules;

#[cfg(test)]
mod tests;

pub use model::{Config, Drain, Events, Limits, Role, Tls};

/// The environment variable that holds the token, where nothing else names one.
pub const TOKEN_VARIABLE: &str = "SPLITRAIL_FLEET_TOKEN";

/// What the checks of this file say and know.
const DIALECT: Dialect = Dialect {
    later_keys: &[],
    later_values: &[],
    renamed_keys: &[],
    secret_keys: &["token", "engine_api_key", "events.login"],
    empty: "start from deploy/shim/splitrail-shim.yaml",
    too_large: "a shim's file is a few lines",
};

/// A configuration that can be run, and what its author may want to know about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration; its paths are no longer relative to the file's folder.
    pub config: Config,
    /// Allowed, but perhaps not meant; sorted by place.
    pub warnings: Vec<Problem>,
}

/// Reads and checks a configuration file. Relative paths in it start at its folder.
///
/// # Errors
/// Every mistake of the file, each with its place; or that it cannot be read.
pub fn load(path: &Path) -> Result<Loaded, Problems> {
    let name = path.display().to_string();
    let text = file::read(path, &name, &DIALECT)?;
    parse(&name, &text, file::folder(path))
}

/// Checks the text of a configuration file. `name` stands for the file in problems;
/// relative paths start at `base_dir`. Looks at the file system and the environment for
/// what the text refers to.
///
/// # Errors
/// Every mistake of the text, each with its place.
pub fn parse(name: &str, text: &str, base_dir: &Path) -> Result<Loaded, Problems> {
    let rules = |root: &Node, report: &mut Report| rules::check(root, base_dir, report);
    let checked = file::parse::<Config>(name, text, &schema(), &DIALECT, rules)?;
    let file::Checked { value: mut config, warnings, .. } = checked;
    config.anchor(base_dir);
    Ok(Loaded { config, warnings })
}

/// Checks what the command line says, as keys and values of a file: the places of problems
/// mean nothing then.
///
/// # Errors
/// Every mistake.
pub fn from_arguments(keys: Map<String, Value>) -> Result<Loaded, Problems> {
    // JSON is YAML.
    parse("command line", &Value::Object(keys).to_string(), Path::new(""))
}

/// The JSON Schema (2020-12) of a configuration file, with the meaning and the default of
/// every key; unknown keys are not allowed anywhere.
#[must_use]
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Config);
    schema.insert("title".to_owned(), "Splitrail shim configuration".into());
    schema.to_value()
}

/// All keys in a Markdown table: path, type, default, meaning.
#[must_use]
pub fn reference_markdown() -> String {
    reference::reference_markdown(&schema())
}
