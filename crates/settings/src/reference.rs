//! Generates the reference table of all keys from the schema.

use std::fmt::Write;

use serde_json::Value as Json;

use crate::scalar::{
    ADDRESS_FORMAT, DURATION_BOUNDS, DURATION_FORMAT, format_duration, parse_duration,
};
use crate::schema::{alternatives, constant, follow, kind, type_name};
use crate::size::{RATE_FORMAT, SIZE_FORMAT, format_rate, format_size};

/// The member of a key's schema that marks a key whose default follows from other keys or from the
/// engines: its description says how.
pub const DERIVED: &str = "x-derived";

/// The members of a number's schema with its least and its greatest value.
const BOUNDS: [&str; 2] = ["minimum", "maximum"];

/// All keys of a configuration as a Markdown table: path, type, default, meaning. `[]` stands for
/// each item of a list.
#[must_use]
pub fn reference_markdown(schema: &Json) -> String {
    let mut table = Table { schema, text: String::new() };
    table.text.push_str("| key | type | default | meaning |\n|---|---|---|---|\n");
    table.object(schema, "", None);
    table.text
}

struct Table<'s> {
    schema: &'s Json,
    text: String,
}

impl<'s> Table<'s> {
    /// The rows of an object's keys. `only` names the kind to which they belong.
    fn object(&mut self, object: &'s Json, path: &str, only: Option<&str>) {
        let required = object.get("required").and_then(Json::as_array);
        let required: Vec<&Json> = required.into_iter().flatten().collect();
        let properties = object.get("properties").and_then(Json::as_object);
        for (key, property) in properties.into_iter().flatten() {
            if key == "kind" && only.is_some() {
                continue;
            }
            let is_required = required.iter().any(|name| *name == key);
            self.row(property, &format!("{path}{key}"), is_required, only);
        }
    }

    fn row(&mut self, property: &'s Json, path: &str, required: bool, only: Option<&str>) {
        let target = follow(self.schema, property);
        let (options, _) = alternatives(self.schema, target);
        let tagged = options.iter().all(|option| kind(option).is_some());
        let nested = matches!(options.as_slice(), [only] if only.get("properties").is_some());
        let default = match property.get("default") {
            _ if required => "required".to_owned(),
            _ if property.get(DERIVED).is_some() => "see meaning".to_owned(),
            // The keys of a section have rows, and defaults, of their own.
            _ if nested => String::new(),
            Some(Json::Null) | None => "none".to_owned(),
            Some(default) => cell(&format!("`{}`", compact(default))),
        };
        let mut meaning = only.map_or_else(String::new, |only| format!("(`kind: {only}`) "));
        meaning.push_str(&description(property));
        let mut described = options.clone();
        described.extend(options.iter().flat_map(|option| self.tagged_items(option)));
        for option in &described {
            if let Some(word) = constant(option).or_else(|| kind(option)) {
                let text = description(option);
                if !text.is_empty() {
                    let _ = write!(meaning, " `{word}`: {}", sentence(&text));
                }
            }
        }
        let kinds = self.type_cell(&options);
        let meaning = cell(&meaning);
        let _ = writeln!(self.text, "| `{path}` | {kinds} | {default} | {meaning} |");
        for option in options {
            if tagged {
                self.object(option, &format!("{path}."), kind(option));
            } else if nested {
                self.object(option, &format!("{path}."), None);
            } else if let Some(items) = option.get("items") {
                let (items, _) = alternatives(self.schema, follow(self.schema, items));
                for item in items.iter().filter(|item| kind(item).is_none()) {
                    self.object(item, &format!("{path}[]."), None);
                }
                for item in self.tagged_items(option) {
                    self.object(item, &format!("{path}[]."), kind(item));
                }
            } else if option.get("properties").is_some() {
                // The mapping form of a value that also has a short form.
                self.object(option, &format!("{path}."), kind(option));
            }
        }
    }

    /// The alternatives of a list's items, if `kind` selects one.
    fn tagged_items(&self, list: &'s Json) -> Vec<&'s Json> {
        let Some(items) = list.get("items") else { return Vec::new() };
        let (options, _) = alternatives(self.schema, follow(self.schema, items));
        if options.iter().all(|option| kind(option).is_some()) { options } else { Vec::new() }
    }

    fn type_cell(&self, options: &[&'s Json]) -> String {
        let words: Vec<String> = options
            .iter()
            .map(|option| match (constant(option), kind(option)) {
                (Some(word), _) => format!("`{word}`"),
                (_, Some(kind)) => format!("`{{ kind: {kind} }}`"),
                _ => self.type_word(option),
            })
            .collect();
        words.join(" or ")
    }

    fn type_word(&self, schema: &'s Json) -> String {
        match schema.get("format").and_then(Json::as_str) {
            Some(SIZE_FORMAT) => {
                let shown = |bound: &Json| bound.as_u64().map(format_size);
                return format!("size{}", range(schema, BOUNDS, shown));
            }
            Some(RATE_FORMAT) => {
                let shown = |bound: &Json| bound.as_u64().map(format_rate);
                return format!("rate{}", range(schema, BOUNDS, shown));
            }
            Some(DURATION_FORMAT) => {
                let shown =
                    |bound: &Json| parse_duration(bound.as_str()?).ok().map(format_duration);
                return format!("duration{}", range(schema, DURATION_BOUNDS, shown));
            }
            Some(ADDRESS_FORMAT) => return "`IP:PORT`".to_owned(),
            _ => {}
        }
        let range = range(schema, BOUNDS, |bound| bound.as_f64().map(|bound| bound.to_string()));
        match type_name(schema) {
            "object" => "mapping".to_owned(),
            "array" => {
                let item = schema.get("items").map(|items| follow(self.schema, items));
                let Some(item) = item else { return "list".to_owned() };
                let (options, _) = alternatives(self.schema, item);
                match type_name(item) {
                    "object" => "list of mappings".to_owned(),
                    _ if options
                        .iter()
                        .all(|option| constant(option).or(kind(option)).is_some()) =>
                    {
                        format!("list of {}", self.type_cell(&options))
                    }
                    _ if options.iter().any(|option| type_name(option) == "object") => {
                        "list of texts or mappings".to_owned()
                    }
                    _ => "list of texts".to_owned(),
                }
            }
            "integer" => format!("integer{range}"),
            "number" => format!("number{range}"),
            "boolean" => "`true` or `false`".to_owned(),
            _ => "text".to_owned(),
        }
    }
}

/// The bounds under two keys of `schema`, as `shown` writes them.
fn range(schema: &Json, keys: [&str; 2], shown: impl Fn(&Json) -> Option<String>) -> String {
    match keys.map(|key| schema.get(key).and_then(&shown)) {
        [Some(least), Some(most)] => format!(", {least} to {most}"),
        [Some(least), None] => format!(", at least {least}"),
        [None, Some(most)] => format!(", at most {most}"),
        [None, None] => String::new(),
    }
}

fn description(schema: &Json) -> String {
    let text = schema.get("description").and_then(Json::as_str).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The text with exactly one full stop at the end.
fn sentence(text: &str) -> String {
    format!("{}.", text.trim_end_matches('.'))
}

/// A value as YAML that can be pasted: `{ kind: least_loaded }`, `[]`, `2s`.
fn compact(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Object(map) => {
            let pairs: Vec<String> =
                map.iter().map(|(key, value)| format!("{key}: {}", compact(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        other => other.to_string(),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
