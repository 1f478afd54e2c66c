//! The shim's configuration, from a file or from the command line.
//!
//! Both are checked against the same schema and the same rules, and all problems are reported
//! together. Addresses are checked here, so later code can rely on them.

use std::path::Path;

use serde_json::{Map, Value};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;
use splitrail_settings::variables::escaped_json;
use splitrail_settings::{FileProfile, Problem, Problems, file, reference};

pub mod model;
mod rules;

#[cfg(test)]
mod tests;

pub use model::{Config, Connector, Drain, Limits, Role, Tls};

/// The environment variable with the token, used if the configuration names no token.
pub const TOKEN_VARIABLE: &str = "SPLITRAIL_FLEET_TOKEN";

/// What the checks of the shim's file need to know.
const PROFILE: FileProfile = FileProfile {
    variables: true,
    secret_keys: &["token", "engine_api_key"],
    hints: &[],
    empty: "start from deploy/shim/splitrail-shim.yaml",
    too_large: "a shim's file is a few lines",
};

/// A valid configuration and its warnings.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// The configuration. Its relative paths have been resolved against the file's folder.
    pub config: Config,
    /// Settings that are allowed but may be mistakes, sorted by position.
    pub warnings: Vec<Problem>,
}

/// Reads and checks a configuration file. Relative paths start at the file's folder.
///
/// # Errors
/// All problems of the file with their positions, or that the file cannot be read.
pub fn load(path: &Path) -> Result<LoadedConfig, Problems> {
    let name = path.display().to_string();
    let text = file::read(path, &name, &PROFILE)?;
    parse(&name, &text, file::folder(path))
}

/// Checks the text of a configuration file. `name` names the file in problems. Relative paths
/// start at `base_dir`. Reads files and environment variables that the text refers to.
///
/// # Errors
/// All problems of the text with their positions.
pub fn parse(name: &str, text: &str, base_dir: &Path) -> Result<LoadedConfig, Problems> {
    let rules = |root: &mut Node, report: &mut ProblemReport| rules::check(root, base_dir, report);
    let checked = file::parse::<Config>(name, text, &schema(), &PROFILE, rules)?;
    let file::CheckedFile { value: mut config, warnings, .. } = checked;
    config.anchor(base_dir);
    Ok(LoadedConfig { config, warnings })
}

/// Checks the flags of the command line as keys and values of a file. The positions of problems
/// have no meaning then.
///
/// # Errors
/// All problems.
pub fn from_arguments(keys: Map<String, Value>) -> Result<LoadedConfig, Problems> {
    // JSON is YAML. The shell has filled in variables already.
    parse("command line", &escaped_json(Value::Object(keys)).to_string(), Path::new(""))
}

/// The JSON Schema (2020-12) of a configuration file, with the meaning and the default of every
/// key. Unknown keys are not allowed.
#[must_use]
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Config);
    schema.insert("title".to_owned(), "Splitrail shim configuration".into());
    schema.to_value()
}

/// The Markdown table of all keys: path, type, default, meaning.
#[must_use]
pub fn reference_markdown() -> String {
    reference::reference_markdown(&schema())
}
