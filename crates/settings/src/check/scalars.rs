//! Checks single values: types, ranges, lengths and formats.

use std::net::SocketAddr;

use serde_json::Value as Json;

use super::Checker;
use crate::scalar::{
    ADDRESS_FORMAT, BadDuration, DURATION_FORMAT, duration_bounds, format_duration, parse_duration,
};
use crate::schema::{alternatives, constant, follow, kind, type_name};
use crate::size::{
    BadSize, RATE_FORMAT, SIZE_FORMAT, format_rate, format_size, parse_rate, parse_size,
};
use crate::tree::{Node, Value, resolve_plain};
use crate::words::{FileProfile, place_name, shown};

impl<'c> Checker<'c> {
    pub(super) fn text(&mut self, node: &Node, text: &str, schema: &Json, path: &str) {
        let name = place_name(path);
        match schema.get("format").and_then(Json::as_str) {
            Some(DURATION_FORMAT) => return self.duration(node, text, schema, path),
            Some(ADDRESS_FORMAT) => return self.address(node, text, path),
            _ => {}
        }
        let length = text.chars().count() as u64;
        let limit = |key| schema.get(key).and_then(Json::as_u64);
        if limit("minLength").is_some_and(|least| length < least) {
            self.report.error(node.at, format!("{name} is empty"), "write a text");
        } else if let Some(most) = limit("maxLength").filter(|most| length > *most) {
            let message = format!("{name} has {length} characters");
            self.report.error(node.at, message, format!("it may have up to {most}"));
        } else if let Some(pattern) = schema.get("pattern").and_then(Json::as_str)
            && let Some(bad) = text.chars().find(|c| !class_allows(pattern, *c))
        {
            let message = format!("{name} may not hold {:?}", bad.to_string());
            self.report.error(node.at, message, format!("allowed: {}", class(pattern)));
        }
        if let Some(constant) = constant(schema).filter(|constant| *constant != text) {
            let message = format!("{name} cannot be \"{}\"", shown(text));
            self.report.error(node.at, message, format!("write {constant}"));
        }
    }

    pub(super) fn integer(&mut self, node: &Node, number: i128, schema: &Json, path: &str) {
        let written = |key| schema.get(key).and_then(Json::as_u64).map(i128::from);
        // If the schema states no maximum, the type's maximum applies.
        let widest = match schema.get("format").and_then(Json::as_str) {
            Some("uint32") => i128::from(u32::MAX),
            _ => i128::from(u64::MAX),
        };
        let least = written("minimum").unwrap_or(0);
        let most = written("maximum").unwrap_or(widest);
        if !(least..=most).contains(&number) {
            let shown = |number: i128| match (sized(schema), u64::try_from(number)) {
                (Some(form), Ok(bytes)) => (form.format)(bytes),
                _ => number.to_string(),
            };
            let message = format!("{} cannot be {}", place_name(path), shown(number));
            self.report.error(
                node.at,
                message,
                format!("from {} to {}", shown(least), shown(most)),
            );
        }
    }

    /// A size or rate that is written as a text.
    pub(super) fn size(&mut self, node: &Node, text: &str, schema: &Json, path: &str) {
        let Some(form) = sized(schema) else { return };
        let why = match (form.parse)(text) {
            Ok(bytes) => return self.integer(node, bytes.into(), schema, path),
            Err(why) => why,
        };
        let example = form.example;
        let hint = match why {
            BadSize::Unit => format!(
                "the units are B, KiB, MiB, GiB, TiB (powers of 1024) and kB, MB, GB, TB (powers of \
                 1000): `{example}`"
            ),
            BadSize::Form => format!("a whole number with a unit, such as `{example}`"),
            BadSize::TooLarge => format!("write a smaller size, such as `{example}`"),
        };
        self.report.error(node.at, format!("{} \"{}\" {why}", place_name(path), shown(text)), hint);
    }

    pub(super) fn number(&mut self, node: &Node, number: f64, schema: &Json, path: &str) {
        let limit = |key| schema.get(key).and_then(Json::as_f64);
        let least = limit("minimum").unwrap_or(f64::MIN);
        let most = limit("maximum").unwrap_or(f64::MAX);
        if !(least..=most).contains(&number) {
            let message = format!("{} cannot be {number}", place_name(path));
            self.report.error(node.at, message, format!("from {least} to {most}"));
        }
    }

    fn duration(&mut self, node: &Node, text: &str, schema: &Json, path: &str) {
        let why = match parse_duration(text) {
            Ok(duration) => {
                let (least, most) = duration_bounds(schema);
                if !(least..=most).contains(&duration) {
                    let message = format!("{} cannot be {}", place_name(path), shown(text));
                    let (least, most) = (format_duration(least), format_duration(most));
                    self.report.error(node.at, message, format!("from {least} to {most}"));
                }
                return;
            }
            Err(why) => why,
        };
        let hint = match why {
            BadDuration::Unit => format!("add a unit: `{}s`?", shown(text)),
            BadDuration::Order => "largest first: `1h30m`, `1m30s`".to_owned(),
            BadDuration::TooLong => "at most 168h".to_owned(),
            BadDuration::Form => {
                "whole numbers with us, ms, s, m or h: `250ms`, `30s`, `1m30s`".to_owned()
            }
        };
        self.report.error(node.at, format!("{} \"{}\" {why}", place_name(path), shown(text)), hint);
    }

    fn address(&mut self, node: &Node, text: &str, path: &str) {
        if text.parse::<SocketAddr>().is_ok() {
            return;
        }
        let hint = match text.rsplit_once(':') {
            Some(("", port)) if port.parse::<u16>().is_ok() => {
                format!("`0.0.0.0:{port}` for all addresses, `127.0.0.1:{port}` for this host only")
            }
            Some(("localhost", port)) if port.parse::<u16>().is_ok() => {
                format!("write an IP address: `127.0.0.1:{port}`")
            }
            _ => "an IP address and a port: `0.0.0.0:8000`, `\"[::]:8000\"`".to_owned(),
        };
        let message = format!("{} \"{}\" is not an address", place_name(path), shown(text));
        self.report.error(node.at, message, hint);
    }

    pub(super) fn wrong_type(&mut self, node: &Node, options: &[&'c Json], path: &str) {
        let mut expected: Vec<String> =
            options.iter().map(|option| self.expected(option)).collect();
        expected.dedup();
        let expected = match options {
            [_, _, ..] if options.iter().all(|option| constant(option).is_some()) => {
                format!("one of {}", expected.join(", "))
            }
            _ => expected.join(", or "),
        };
        let message = match &node.value {
            Value::Null => format!("{} is left empty; it must be {expected}", place_name(path)),
            _ => format!(
                "{} must be {expected}, not {}",
                place_name(path),
                self.profile.found(node, path)
            ),
        };
        self.report.error(node.at, message, fix(self.profile, node, options, path));
    }

    /// A description of the values that this schema allows.
    pub(super) fn expected(&self, schema: &'c Json) -> String {
        let schema = follow(self.schema, schema);
        let (options, _) = alternatives(self.schema, schema);
        if let [only] = options.as_slice() {
            return match (constant(only), type_name(only)) {
                (Some(word), _) => format!("`{word}`"),
                (_, "object") => "a mapping".to_owned(),
                (_, "array") => "a list".to_owned(),
                (_, "integer") => match sized(only) {
                    Some(form) => format!("a size such as `{}`", form.example),
                    None => "a whole number".to_owned(),
                },
                (_, "number") => "a number".to_owned(),
                (_, "boolean") => "true or false".to_owned(),
                _ => match only.get("format").and_then(Json::as_str) {
                    Some(DURATION_FORMAT) => "a duration such as `30s`".to_owned(),
                    Some(ADDRESS_FORMAT) => "an address such as `0.0.0.0:8000`".to_owned(),
                    _ => "a text".to_owned(),
                },
            };
        }
        if let Some(kinds) = options.iter().map(|option| kind(option)).collect::<Option<Vec<_>>>() {
            return format!("a mapping with `kind:` {}", kinds.join(" | "));
        }
        let words: Vec<String> = options.iter().map(|option| self.expected(option)).collect();
        format!("one of {}", words.join(", "))
    }
}

/// How sizes of one format are written.
pub(super) struct SizeForm {
    parse: fn(&str) -> Result<u64, BadSize>,
    format: fn(u64) -> String,
    example: &'static str,
}

/// How a value of this schema is written, if it is a size or a rate.
pub(super) fn sized(schema: &Json) -> Option<SizeForm> {
    match schema.get("format").and_then(Json::as_str) {
        Some(SIZE_FORMAT) => {
            Some(SizeForm { parse: parse_size, format: format_size, example: "64MiB" })
        }
        Some(RATE_FORMAT) => {
            Some(SizeForm { parse: parse_rate, format: format_rate, example: "4KiB/s" })
        }
        _ => None,
    }
}

/// A hint for a value of the wrong type.
fn fix(profile: &FileProfile, node: &Node, options: &[&Json], path: &str) -> String {
    if let Some(hint) = profile.hint(path) {
        return hint.to_owned();
    }
    if is_off(node) && options.iter().any(|option| constant(option) == Some("none")) {
        return "did you mean `none`?".to_owned();
    }
    let wants = |name| options.iter().any(|option| type_name(option) == name);
    let format = options.iter().find_map(|option| option.get("format").and_then(Json::as_str));
    let words: Option<Vec<&str>> = options.iter().map(|option| constant(option)).collect();
    if let Some([first, others @ ..]) = words.as_deref()
        && matches!(node.value, Value::Bool(_) | Value::Int(_) | Value::Float(_))
    {
        let add = |hint, word: &&str| format!("{hint} or `{word}`");
        return others.iter().fold(format!("write `{first}`"), add);
    }
    match &node.value {
        Value::Null => "write a value; a key that has a default can also be deleted".to_owned(),
        Value::Str(text) if wants("integer") || wants("number") => match resolve_plain(text) {
            Value::Int(number) => format!("write {number} without quotes"),
            Value::Float(number) if wants("number") => format!("write {number} without quotes"),
            _ if !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '_') => {
                format!("write {} without underscores", text.replace('_', ""))
            }
            _ => "write a plain number, without a unit".to_owned(),
        },
        Value::Float(_) if options.iter().any(|option| sized(option).is_some()) => {
            "write a whole number with a unit, such as `64MiB`".to_owned()
        }
        Value::Float(_) if wants("integer") => "write it without a fraction or exponent".to_owned(),
        Value::Int(number) if format == Some(DURATION_FORMAT) => {
            format!("add a unit: `{number}s` or `{number}ms`")
        }
        Value::Int(port) if format == Some(ADDRESS_FORMAT) => {
            format!("an IP address and a port: `0.0.0.0:{port}`")
        }
        Value::Seq(_) if format == Some(ADDRESS_FORMAT) => "put it in quotes".to_owned(),
        Value::Bool(_) | Value::Int(_) | Value::Float(_)
            if wants("string") && !profile.is_secret(path) =>
        {
            "put it in quotes to make it a text".to_owned()
        }
        _ if wants("array") => "start each item on a line of its own, after `- `".to_owned(),
        _ if wants("object") => "write `key: value` lines below it, indented".to_owned(),
        _ => "write a single value".to_owned(),
    }
}

/// Whether a value is a word by which people switch things off.
fn is_off(node: &Node) -> bool {
    let is_word = |text| ["off", "no", "false", "disabled"].contains(&text);
    node.value == Value::Bool(false) || node.text().is_some_and(is_word)
}

/// Whether `c` is in the class of a pattern of the form `^[CLASS]+$`, the only form that the schema
/// uses for texts without a format.
fn class_allows(pattern: &str, c: char) -> bool {
    let class: Vec<char> = class(pattern).chars().collect();
    let mut rest = class.as_slice();
    while let [first, after @ ..] = rest {
        match after {
            ['-', last, next @ ..] => {
                if (*first..=*last).contains(&c) {
                    return true;
                }
                rest = next;
            }
            _ => {
                if *first == c {
                    return true;
                }
                rest = after;
            }
        }
    }
    false
}

fn class(pattern: &str) -> &str {
    pattern.strip_prefix("^[").and_then(|rest| rest.strip_suffix("]+$")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_of_worker_ids_allows_its_character_class() {
        let pattern = "^[A-Za-z0-9._:-]+$";
        assert!("aZ09._:-".chars().all(|c| class_allows(pattern, c)));
        assert!(!" /\u{e9}{;,\n".chars().any(|c| class_allows(pattern, c)));
    }
}
