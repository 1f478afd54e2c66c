//! Python's string methods where Rust's notion of white space or of a line
//! differs, and a few that minijinja's compatibility layer does not have.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// What `str.isspace` says of one character, and what `str.strip` and
/// `str.split` cut at: Unicode's white space and four ASCII separators.
pub(super) fn is_space(ch: char) -> bool {
    ch.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&ch)
}

/// Where `str.splitlines` cuts; `\r\n` is one end of line.
fn is_line_end(ch: char) -> bool {
    matches!(
        ch,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// Called for methods that minijinja does not know on a value.
///
/// Only strings need care; everything else is minijinja-contrib's.
pub(super) fn unknown_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)?
    {
        return Ok(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            split(text, separator, limit.unwrap_or(-1))?
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            match (separator, usize::try_from(limit.unwrap_or(-1))) {
                (_, Err(_)) => split(text, separator, -1)?,
                (Some(separator), Ok(limit)) if !separator.is_empty() => {
                    let mut parts: Vec<&str> =
                        text.rsplitn(limit.saturating_add(1), separator).collect();
                    parts.reverse();
                    parts.into_iter().map(Value::from).collect()
                }
                _ => return Err(unsupported("rsplit")),
            }
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            split_lines(text, keep_ends.unwrap_or(false))
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(is_space))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")
        }
        _ => return Ok(None),
    }))
}

fn unsupported(method: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("{method}: arguments not supported"),
    )
}

/// `str.strip` and its one-sided forms.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let cut = |ch: char| match chars {
        Some(set) => set.contains(ch),
        None => is_space(ch),
    };
    let text = if left {
        text.trim_start_matches(cut)
    } else {
        text
    };
    if right {
        text.trim_end_matches(cut)
    } else {
        text
    }
}

fn split(text: &str, separator: Option<&str>, limit: i64) -> Result<Value, Error> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX - 1);
    match separator {
        Some("") => Err(unsupported("split")),
        Some(separator) => Ok(text
            .splitn(limit.saturating_add(1), separator)
            .map(Value::from)
            .collect()),
        None => {
            let mut parts = Vec::new();
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = if parts.len() >= limit {
                    None
                } else {
                    rest.find(is_space)
                };
                match end {
                    Some(end) => {
                        parts.push(Value::from(&rest[..end]));
                        rest = rest[end..].trim_start_matches(is_space);
                    }
                    None => {
                        parts.push(Value::from(rest.trim_end_matches(is_space)));
                        break;
                    }
                }
            }
            Ok(Value::from(parts))
        }
    }
}

fn split_lines(text: &str, keep_ends: bool) -> Value {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(is_line_end) else {
            lines.push(Value::from(rest));
            break;
        };
        let width = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(Value::from(
            &rest[..if keep_ends { end + width } else { end }],
        ));
        rest = &rest[end + width..];
    }
    Value::from(lines)
}

fn partition(text: &str, separator: &str, last: bool) -> Value {
    let found = if last {
        text.rsplit_once(separator)
    } else {
        text.split_once(separator)
    };
    let parts = match found {
        Some((head, tail)) => [head, separator, tail],
        None if last => ["", "", text],
        None => [text, "", ""],
    };
    parts.into_iter().map(Value::from).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn strings(value: &Value) -> Vec<String> {
        value
            .try_iter()
            .unwrap()
            .map(|item| item.to_string())
            .collect()
    }

    #[test]
    fn split_without_separator_drops_white_space_at_both_ends() {
        assert_eq!(
            strings(&split(" a \u{1f} b\u{3000}c ", None, -1).unwrap()),
            ["a", "b", "c"]
        );
        assert_eq!(strings(&split(" a b  c ", None, 1).unwrap()), ["a", "b  c"]);
        assert!(strings(&split("  ", None, -1).unwrap()).is_empty());
    }

    #[test]
    fn lines_end_where_python_says() {
        assert_eq!(
            strings(&split_lines("a\r\nb\u{2028}c\n\nd", false)),
            ["a", "b", "c", "", "d"]
        );
        assert_eq!(strings(&split_lines("a\r\nb\n", true)), ["a\r\n", "b\n"]);
    }
}
