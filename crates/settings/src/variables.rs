//! Variables of the environment in the values of a file: `${NAME}` and `${NAME:-default}`.
//!
//! Values are filled after the text was parsed. The value of a variable is therefore part of one
//! scalar and never of the file's structure, whatever characters it has. A filled value has the
//! type that its key has: `in_flight_max: ${PLACES}` is a number, and `name: ${NAME}` is a text
//! even if the variable is a number. Keys are not filled.
//!
//! A secret that is `${NAME}` becomes the reference `{ kind: env, name: NAME }`: its value is not
//! part of the configuration. Of other values, messages show what the file has.

use std::borrow::Cow;
use std::env::VarError;

use serde_json::Value as Json;

use crate::file::FILE_MAX_BYTES;
use crate::problem::{Place, ProblemReport};
use crate::schema::{alternatives, constant, follow, kind, type_name};
use crate::tree::{Entry, Node, Value, allowed, resolve_plain};
use crate::words::{FileProfile, join, place_name};

mod editors;

pub use editors::schema_with_variables;

/// An environment: the value of each variable.
pub(crate) type Lookup<'l> = &'l dyn Fn(&str) -> Result<String, VarError>;

const HINT: &str = "write `${NAME}` or `${NAME:-default}`; a literal `$` is `$$`";

/// Fills all values below `root`; `schema` says which types they should have.
pub(crate) fn fill(
    root: &mut Node,
    schema: &Json,
    environment: Lookup<'_>,
    profile: &FileProfile,
    report: &mut ProblemReport,
) {
    let mut filler = Filler { schema, environment, profile, report, bytes_left: FILE_MAX_BYTES };
    filler.node(root, &alternatives(schema, follow(schema, schema)).0, "");
}

/// The first `${NAME` of a text that begins like a variable, up to its end.
pub(crate) fn first(text: &str) -> Option<&str> {
    text.match_indices("${").find_map(|(at, _)| {
        let end = text[at..].find('}')?;
        let name = text[at + 2..at + end].bytes().next()?;
        (name.is_ascii_alphabetic() || name == b'_').then(|| &text[at..=at + end])
    })
}

/// A text that is read as `text`: without variables.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains("$$") && !text.contains("${") {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        escaped.push(c);
        if c == '$' && matches!(chars.peek(), Some('$' | '{')) {
            escaped.push('$');
        }
    }
    Cow::Owned(escaped)
}

/// The same JSON with all texts [`escaped`], for what is read as a configuration.
#[must_use]
pub fn escaped_json(mut json: Json) -> Json {
    match &mut json {
        Json::String(text) => {
            if let Cow::Owned(escaped) = escaped(text) {
                *text = escaped;
            }
        }
        Json::Array(items) => items.iter_mut().for_each(|item| *item = escaped_json(item.take())),
        Json::Object(members) => {
            members.values_mut().for_each(|member| *member = escaped_json(member.take()));
        }
        _ => {}
    }
    json
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
enum Part<'t> {
    /// A piece that stands for itself.
    Literal(&'t str),
    /// A variable, with its default.
    Variable { name: &'t str, default: Option<&'t str> },
}

/// A `${` that begins no variable.
#[derive(Debug, PartialEq, Eq)]
struct NoVariable;

/// The parts of a text. A `$` that neither `$` nor `{` follows stands for itself.
fn parts(text: &str) -> Result<Vec<Part<'_>>, NoVariable> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, from) = rest.split_at(at);
        parts.push(Part::Literal(before));
        if let Some(after) = from.strip_prefix("$$") {
            parts.push(Part::Literal("$"));
            rest = after;
        } else if let Some(after) = from.strip_prefix("${") {
            let (variable, after) = after.split_once('}').ok_or(NoVariable)?;
            let (name, default) = match variable.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (variable, None),
            };
            if !is_name(name) || default.is_some_and(|default| default.contains("${")) {
                return Err(NoVariable);
            }
            parts.push(Part::Variable { name, default });
            rest = after;
        } else {
            parts.push(Part::Literal("$"));
            rest = &from[1..];
        }
    }
    parts.push(Part::Literal(rest));
    parts.retain(|part| *part != Part::Literal(""));
    Ok(parts)
}

/// Whether a text is the name of a variable (POSIX, "Environment Variable Definition").
fn is_name(text: &str) -> bool {
    !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

struct Filler<'f> {
    /// The whole schema, for references into it.
    schema: &'f Json,
    environment: Lookup<'f>,
    profile: &'f FileProfile,
    report: &'f mut ProblemReport,
    /// How many bytes the values of variables may still add.
    bytes_left: usize,
}

impl<'f> Filler<'f> {
    /// Fills the values below `node`, which may be of one of the types `options`.
    fn node(&mut self, node: &mut Node, options: &[&'f Json], path: &str) {
        let tag = node.get("kind").and_then(Node::text).map(str::to_owned);
        match &mut node.value {
            Value::Str(text) if text.contains('$') => {
                let text = std::mem::take(text);
                node.value = self.scalar(node.at, text, options, path);
            }
            Value::Seq(items) => {
                let below = options.iter().filter_map(|option| option.get("items"));
                let below = self.all_options(below);
                for (index, item) in items.iter_mut().enumerate() {
                    self.node(item, &below, &format!("{path}[{index}]"));
                }
            }
            Value::Map(entries) => {
                let is_tagged =
                    |option: &&&Json| kind(option).is_some_and(|it| Some(it) == tag.as_deref());
                let tagged: Vec<&Json> = options.iter().filter(is_tagged).copied().collect();
                let options = if tagged.is_empty() { options } else { &tagged };
                for entry in entries {
                    let property = |option: &&'f Json| option.get("properties")?.get(&entry.key);
                    let below = self.all_options(options.iter().filter_map(property));
                    self.node(&mut entry.value, &below, &join(path, &entry.key));
                }
            }
            _ => {}
        }
    }

    fn all_options(&self, schemas: impl Iterator<Item = &'f Json>) -> Vec<&'f Json> {
        schemas
            .flat_map(|schema| alternatives(self.schema, follow(self.schema, schema)).0)
            .collect()
    }

    /// The value for a text that has a `$`.
    fn scalar(&mut self, at: Place, text: String, options: &[&'f Json], path: &str) -> Value {
        let Ok(parts) = parts(&text) else {
            let message = format!("{} has a `${{` that begins no variable", place_name(path));
            self.report.unknown(at, message, HINT);
            return Value::Str(text);
        };
        if options.iter().any(|option| kind(option) == Some("env")) {
            return self.secret(at, &parts, path).unwrap_or(Value::Str(text));
        }
        let is_literal = parts.iter().all(|part| matches!(part, Part::Literal(_)));
        let Some(filled) = self.filled(at, &parts, path) else { return Value::Str(text) };
        if is_literal {
            self.warn_of_bare_name(at, &text, path);
            return Value::Str(filled);
        }
        self.report.hide(at, &filled, &text);
        // Values that no key describes, such as options of templates, are as if they were written.
        let wants = |name: &str| {
            options.is_empty()
                || options.iter().any(|option| {
                    [name, ""].contains(&type_name(option)) && constant(option).is_none()
                })
        };
        match resolve_plain(&filled) {
            number @ (Value::Int(_) | Value::Float(_)) if wants("integer") || wants("number") => {
                number
            }
            yes @ Value::Bool(_) if wants("boolean") => yes,
            _ => Value::Str(filled),
        }
    }

    /// A reference to the variable of which a secret consists.
    fn secret(&mut self, at: Place, parts: &[Part<'_>], path: &str) -> Option<Value> {
        let name = match parts {
            [Part::Variable { name, default: None }] => *name,
            parts if parts.iter().any(|part| matches!(part, Part::Variable { .. })) => {
                let message = format!("{} can only be a variable as a whole", place_name(path));
                self.report.unknown(at, message, "write `${NAME}`, without a default");
                return None;
            }
            _ => return None,
        };
        let entry = |key: &str, text: &str| Entry {
            key: key.to_owned(),
            key_at: at,
            value: Node::new(at, Value::Str(text.to_owned())),
        };
        Some(Value::Map(vec![entry("kind", "env"), entry("name", name)]))
    }

    /// The text with the values of its variables; `None` if there is a mistake.
    fn filled(&mut self, at: Place, parts: &[Part<'_>], path: &str) -> Option<String> {
        let mut filled = String::new();
        for part in parts {
            match part {
                Part::Literal(text) => filled.push_str(text),
                Part::Variable { name, default } => {
                    filled.push_str(&self.value(at, name, *default, path)?);
                }
            }
        }
        Some(filled)
    }

    fn value(
        &mut self,
        at: Place,
        name: &str,
        default: Option<&str>,
        path: &str,
    ) -> Option<String> {
        let place = place_name(path);
        let found = match (self.environment)(name) {
            // As in a shell, `:-` stands for variables that are empty, too.
            Ok(value) if value.is_empty() && default.is_some() => Err(VarError::NotPresent),
            found => found,
        };
        let (message, hint) = match (found, default) {
            (Ok(value), _) => match value.chars().find(|c| !allowed(*c)) {
                None if value.len() <= self.bytes_left => {
                    self.bytes_left -= value.len();
                    return Some(value);
                }
                None => (
                    "the values of variables make the configuration too large".to_owned(),
                    format!("they may have {FILE_MAX_BYTES} bytes together"),
                ),
                Some(found) => (
                    format!(
                        "the variable `{name}` of {place} has the character U+{:04X}",
                        u32::from(found)
                    ),
                    "values have no control characters".to_owned(),
                ),
            },
            (Err(VarError::NotPresent), Some(default)) => {
                return Some(default.replace("$$", "$"));
            }
            (Err(VarError::NotPresent), None) => (
                format!("{place} needs the variable `{name}` of the environment, which is not set"),
                format!(
                    "set {name} where the program runs, and for checks as well, or write a default: \
                     `${{{name}:-default}}`"
                ),
            ),
            (Err(VarError::NotUnicode(_)), _) => (
                format!("the variable `{name}` of {place} is not UTF-8"),
                "set it to a text".to_owned(),
            ),
        };
        self.report.unknown(at, message, hint);
        None
    }

    /// Warns of a text such as `$HOME`, which a shell would fill.
    fn warn_of_bare_name(&mut self, at: Place, text: &str, path: &str) {
        if self.profile.is_secret(path) || text.contains("$$") {
            return;
        }
        let names = text.match_indices('$').map(|(start, _)| {
            let rest = &text[start + 1..];
            let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())]
        });
        if let Some(name) = { names }.find(|name| name.len() > 1 && is_name(name)) {
            let message = format!("{} has `${name}`, which is taken as it is", place_name(path));
            let hint = format!("write `${{{name}}}` for the variable, or `$${name}` for this text");
            self.report.warn(at, message, hint);
        }
    }
}

#[cfg(test)]
mod tests;
