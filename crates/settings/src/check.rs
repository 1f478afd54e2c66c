//! Compares a tree with the schema and reports every difference with its place.

use serde_json::{Map, Value as Json};

mod scalars;

use scalars::sized;

use crate::problem::{Place, ProblemReport};
use crate::schema::{alternatives, constant, follow, kind, type_name};
use crate::tree::{Node, Value};
use crate::words::{FileProfile, join, place_name, shown, suggest};

/// Reports whatever `schema` does not allow in the tree under `root`.
pub(crate) fn check(root: &Node, schema: &Json, profile: &FileProfile, report: &mut ProblemReport) {
    Checker { schema, profile, report }.any(root, schema, "");
}

struct Checker<'c> {
    /// The whole schema, for references into it.
    schema: &'c Json,
    profile: &'c FileProfile,
    report: &'c mut ProblemReport,
}

impl<'c> Checker<'c> {
    fn any(&mut self, node: &Node, schema: &'c Json, path: &str) {
        let schema = follow(self.schema, schema);
        let (options, nullable) = alternatives(self.schema, schema);
        if nullable && node.value == Value::Null {
            return;
        }
        match options.as_slice() {
            [] => {}
            [only] => self.one(node, only, path),
            many if many.iter().all(|option| constant(option).is_some()) => {
                self.choice(node, many, path);
            }
            many if many.iter().all(|option| kind(option).is_some()) => {
                self.tagged(node, many, path);
            }
            many => self.mixed(node, many, path),
        }
    }

    fn one(&mut self, node: &Node, schema: &'c Json, path: &str) {
        match (type_name(schema), &node.value) {
            ("object", Value::Map(_)) => self.object(node, schema, path),
            ("array", Value::Seq(items)) => self.list(node, items, schema, path),
            ("string", Value::Str(text)) => self.text(node, text, schema, path),
            ("integer", Value::Int(number)) => self.integer(node, *number, schema, path),
            ("integer", Value::Str(text)) if sized(schema).is_some() => {
                self.size(node, text, schema, path);
            }
            ("number", Value::Int(number)) => self.number(node, *number as f64, schema, path),
            ("number", Value::Float(number)) => self.number(node, *number, schema, path),
            ("boolean", Value::Bool(_)) => {}
            _ => self.wrong_type(node, &[schema], path),
        }
    }

    fn object(&mut self, node: &Node, schema: &'c Json, path: &str) {
        let Some(properties) = schema.get("properties").and_then(Json::as_object) else {
            return;
        };
        for entry in node.entries() {
            match properties.get(&entry.key) {
                Some(schema) => self.any(&entry.value, schema, &join(path, &entry.key)),
                None => self.unknown_key(entry.key_at, &entry.key, properties, path),
            }
        }
        let required = schema.get("required").and_then(Json::as_array);
        for key in required.into_iter().flatten().filter_map(Json::as_str) {
            if node.get(key).is_none() {
                let message = format!("{} has no `{key}`", place_name(path));
                let hint = match properties.get(key) {
                    Some(schema) => format!("add `{key}:`, {}", self.expected(schema)),
                    None => format!("add `{key}:`"),
                };
                self.report.error(node.at, message, hint);
            }
        }
    }

    fn unknown_key(&mut self, at: Place, key: &str, properties: &Map<String, Json>, path: &str) {
        let known: Vec<&str> = properties.keys().map(String::as_str).collect();
        if self.profile.is_secret(path) {
            // The secret itself may have been written as a key.
            let message = format!("{} has an unknown key", place_name(path));
            self.report.error(at, message, suggest("", &known, "known here"));
        } else if key == "<<" {
            let message = "merge keys (`<<`) are not part of YAML 1.2".to_owned();
            self.report.error(at, message, "repeat the keys, or alias whole values");
        } else {
            let message = format!("{} has an unknown key `{}`", place_name(path), shown(key));
            self.report.error(at, message, suggest(key, &known, "known here"));
        }
    }

    fn list(&mut self, node: &Node, items: &[Node], schema: &'c Json, path: &str) {
        let least = schema.get("minItems").and_then(Json::as_u64).unwrap_or(0);
        if (items.len() as u64) < least {
            let message = format!("{} is empty", place_name(path));
            self.report.error(node.at, message, format!("it needs at least {least} item"));
        }
        if let Some(schema) = schema.get("items") {
            for (index, item) in items.iter().enumerate() {
                self.any(item, schema, &format!("{path}[{index}]"));
            }
        }
    }

    fn tagged(&mut self, node: &Node, options: &[&'c Json], path: &str) {
        let kinds: Vec<&str> = options.iter().filter_map(|option| kind(option)).collect();
        let example = format!("write it as `{{ kind: {}, ... }}`", kinds.join(" | "));
        if !matches!(node.value, Value::Map(_)) {
            let chosen = node.text().filter(|text| kinds.contains(text));
            let example = match (self.profile.hint(path), chosen) {
                (Some(hint), _) => hint.to_owned(),
                (None, Some(kind)) => format!("write it as `{{ kind: {kind} }}`"),
                (None, None) => example,
            };
            let message = match self.profile.is_secret(path) {
                true => format!("{} is a reference, never the secret itself", place_name(path)),
                false => {
                    format!(
                        "{} must be a mapping, not {}",
                        place_name(path),
                        self.profile.found(node, path)
                    )
                }
            };
            self.report.error(node.at, message, example);
            return;
        }
        let Some(tag) = node.get("kind") else {
            let message = format!("{} has no `kind`", place_name(path));
            self.report.error(node.at, message, example);
            return;
        };
        let chosen = options.iter().find(|option| kind(option) == tag.text());
        match (tag.text(), chosen) {
            (Some(_), Some(schema)) => self.object(node, schema, path),
            (Some(text), None) => self.unknown_value(tag, text, &kinds, path, "kind"),
            (None, _) => {
                let path = join(path, "kind");
                let message =
                    format!("`{path}` must be a text, not {}", self.profile.found(tag, &path));
                self.report.error(tag.at, message, format!("one of: {}", kinds.join(", ")));
            }
        }
    }

    fn choice(&mut self, node: &Node, options: &[&'c Json], path: &str) {
        let allowed: Vec<&str> = options.iter().filter_map(|option| constant(option)).collect();
        match node.text() {
            Some(text) if allowed.contains(&text) => {}
            Some(text) => self.unknown_value(node, text, &allowed, path, ""),
            None => self.wrong_type(node, options, path),
        }
    }

    /// `part` is `kind` if the value is the tag of the mapping at `path`.
    fn unknown_value(&mut self, node: &Node, text: &str, allowed: &[&str], path: &str, part: &str) {
        let name = if part.is_empty() { path.to_owned() } else { join(path, part) };
        if self.profile.is_secret(path) {
            let message = format!("`{name}` has an unknown value");
            self.report.error(node.at, message, format!("one of: {}", allowed.join(", ")));
        } else {
            let message = format!("`{name}` cannot be \"{}\"", shown(text));
            self.report.error(node.at, message, suggest(text, allowed, "one of"));
        }
    }

    /// Alternatives of different types, such as a number or a text.
    fn mixed(&mut self, node: &Node, options: &[&'c Json], path: &str) {
        let tagged: Vec<&Json> =
            options.iter().copied().filter(|option| kind(option).is_some()).collect();
        if !tagged.is_empty() && matches!(node.value, Value::Map(_)) {
            return self.tagged(node, &tagged, path);
        }
        let fitting = options.iter().find(|option| {
            matches!(
                (type_name(option), &node.value),
                ("integer" | "number", Value::Int(_))
                    | ("number", Value::Float(_))
                    | ("object", Value::Map(_))
                    | ("array", Value::Seq(_))
            ) || node.text().is_some_and(|text| match constant(option) {
                Some(constant) => constant == text,
                None => type_name(option) == "string",
            })
        });
        match fitting {
            Some(option) => self.one(node, option, path),
            None => self.wrong_type(node, options, path),
        }
    }
}
