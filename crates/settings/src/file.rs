//! Reads a file into a checked value.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use crate::problem::{Place, Problem, ProblemReport, Problems};
use crate::tree::{self, Node};
use crate::words::{FileProfile, join, place_name, shown};
use crate::{check, variables};

/// Maximum size of a configuration file in bytes; a fleet of 10,000 workers needs about 2 MB.
pub(crate) const FILE_MAX_BYTES: usize = 4 << 20;

/// Reads the text of a configuration file, which is called `name` in problems.
///
/// # Errors
/// The file cannot be read, is too large or is not UTF-8.
pub fn read(path: &Path, name: &str, profile: &FileProfile) -> Result<String, Problems> {
    read_from(File::open(path), name, profile)
}

/// Like [`read`], from a source that is open already, such as standard input.
///
/// # Errors
/// As [`read`].
pub fn read_from(
    source: io::Result<impl Read>,
    name: &str,
    profile: &FileProfile,
) -> Result<String, Problems> {
    let mut report = ProblemReport::new(name);
    let mut bytes = Vec::new();
    let read =
        source.and_then(|source| source.take(FILE_MAX_BYTES as u64 + 1).read_to_end(&mut bytes));
    if let Err(error) = read {
        let hint = "name a readable YAML file";
        report.error(Place::START, format!("the file cannot be read: {error}"), hint);
        return Err(report.into_problems().of_unreadable_file());
    }
    if bytes.len() > FILE_MAX_BYTES {
        too_large(&mut report, profile);
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

/// The folder of a configuration file, against which relative paths in the file are resolved. For a
/// file name without a folder, it is the current folder.
#[must_use]
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file without mistakes.
#[derive(Clone, Debug)]
pub struct CheckedFile<T> {
    /// The typed configuration.
    pub value: T,
    /// Settings that are allowed but perhaps not intended; sorted by place.
    pub warnings: Vec<Problem>,
    /// The tree of the file, in which every value has its place.
    pub root: Node,
}

/// Checks the text of a file called `name` against `schema` and then `rules`, and converts it to a
/// value. Variables that the text names are read from the environment of the process, if the
/// profile allows them. The rules may write short forms out in the tree.
///
/// # Errors
/// Every mistake of the text, with its place.
pub fn parse<T: DeserializeOwned>(
    name: &str,
    text: &str,
    schema: &Json,
    profile: &FileProfile,
    rules: impl FnOnce(&mut Node, &mut ProblemReport),
) -> Result<CheckedFile<T>, Problems> {
    let environment = |name: &str| std::env::var(name);
    parse_with(&environment, name, text, schema, profile, rules)
}

/// Like [`parse`], in another environment.
pub(crate) fn parse_with<T: DeserializeOwned>(
    environment: variables::Lookup<'_>,
    name: &str,
    text: &str,
    schema: &Json,
    profile: &FileProfile,
    rules: impl FnOnce(&mut Node, &mut ProblemReport),
) -> Result<CheckedFile<T>, Problems> {
    let mut report = ProblemReport::new(name);
    if text.len() > FILE_MAX_BYTES {
        too_large(&mut report, profile);
        return Err(report.into_problems());
    }
    let Some(mut root) = tree::read(text, profile, &mut report) else {
        return Err(report.into_problems());
    };
    if profile.variables {
        variables::fill(&mut root, schema, environment, profile, &mut report);
    } else {
        literal_variables(&root, "", profile, &mut report);
    }
    check::check(&root, schema, profile, &mut report);
    rules(&mut root, &mut report);
    if report.has_errors() {
        return Err(report.into_problems());
    }
    match serde_json::from_value(root.to_json()) {
        Ok(value) => Ok(CheckedFile { value, warnings: report.into_warnings(), root }),
        Err(error) => {
            let hint = "this mistake should have been found with its place: please report it";
            report.error(root.at, format!("the configuration is not valid: {error}"), hint);
            Err(report.into_problems())
        }
    }
}

/// Warns of texts that look as if they were to be filled from the environment, in a file in which
/// nothing is.
fn literal_variables(node: &Node, path: &str, profile: &FileProfile, report: &mut ProblemReport) {
    match &node.value {
        tree::Value::Str(text) if !profile.is_secret(path) => {
            let Some(variable) = variables::first(text) else { return };
            let variable = shown(variable);
            let message = format!("{} has `{variable}`, which is taken as it is", place_name(path));
            let hint = "variables of the environment are not put in here: write the value";
            report.warn(node.at, message, hint);
        }
        tree::Value::Seq(items) => {
            for (index, item) in items.iter().enumerate() {
                literal_variables(item, &format!("{path}[{index}]"), profile, report);
            }
        }
        tree::Value::Map(entries) => {
            for entry in entries {
                literal_variables(&entry.value, &join(path, &entry.key), profile, report);
            }
        }
        _ => {}
    }
}

fn too_large(report: &mut ProblemReport, profile: &FileProfile) {
    let message = format!("the file is larger than {FILE_MAX_BYTES} bytes");
    report.error(Place::START, message, profile.too_large);
}
