//! Python's string methods where Rust's definition of white space or of a line differs, and some
//! that minijinja's compatibility layer lacks.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::written::BoundedText;

/// Maximum width of `indent` in characters.
const MAX_INDENT: usize = 64;

/// Python's `str.isspace` for one character, which is also where `str.strip` and `str.split` cut:
/// Unicode white space and four ASCII separators.
pub(super) fn is_space(ch: char) -> bool {
    ch.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&ch)
}

/// Whether `str.splitlines` cuts at a character; `\r\n` counts as one line end.
fn is_line_end(ch: char) -> bool {
    matches!(
        ch,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// Called for methods that minijinja does not know for a value. Strings are handled here; all other
/// values are passed to minijinja-contrib.
pub(super) fn unknown_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(text) = value.as_str()
        && let Some(result) = string_method(value, text, method, args)?
    {
        return Ok(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(
    value: &Value,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            stripped(value, text, chars, method != "rstrip", method != "lstrip")
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
            lines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text)?)
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
    Error::new(ErrorKind::InvalidOperation, format!("{method}: arguments not supported"))
}

/// `str.strip` of a value that is this text. An unchanged text is not copied, because it may be
/// long.
pub(super) fn stripped(
    value: &Value,
    text: &str,
    chars: Option<&str>,
    left: bool,
    right: bool,
) -> Value {
    match strip(text, chars, left, right) {
        same if same.len() == text.len() => value.clone(),
        less => Value::from(less),
    }
}

/// `str.strip` and its one-sided forms.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let cut = |ch: char| match chars {
        Some(set) => set.contains(ch),
        None => is_space(ch),
    };
    let text = if left { text.trim_start_matches(cut) } else { text };
    if right { text.trim_end_matches(cut) } else { text }
}

/// `str.title`: a letter that does not follow a letter becomes a capital.
fn title(text: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for ch in text.chars() {
        let mut upper = ch.to_uppercase();
        match (in_word, upper.next(), upper.next()) {
            // Letters with a special title case, which the standard library does not know.
            (_, _, Some(_)) | (_, Some('\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}'), _) => {
                return Err(unsupported("title"));
            }
            // The lower case of a final sigma depends on the characters around it.
            (true, ..) if ch == '\u{3a3}' => return Err(unsupported("title")),
            (true, ..) => out.extend(ch.to_lowercase()),
            (false, first, _) => out.extend(first),
        }
        in_word = ch.is_lowercase() || ch.is_uppercase();
    }
    Ok(out)
}

fn split(text: &str, separator: Option<&str>, limit: i64) -> Result<Value, Error> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX - 1);
    match separator {
        Some("") => Err(unsupported("split")),
        Some(separator) => {
            Ok(text.splitn(limit.saturating_add(1), separator).map(Value::from).collect())
        }
        None => {
            let mut parts = Vec::new();
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = if parts.len() >= limit { None } else { rest.find(is_space) };
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

fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(is_line_end) else {
            lines.push(rest);
            break;
        };
        let width = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    lines
}

/// Jinja2's `indent` filter: `width` (a number or a text), then `first` and `blank`, each by
/// position or by name. A final line end is kept.
pub(super) fn indent(
    text: Cow<'_, str>,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let option = |index: usize, name: &str| match args.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    };
    let indent = match option(0, "width")? {
        None => "    ".to_owned(),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width)?.min(MAX_INDENT)),
        },
    };
    let first = option(1, "first")?.is_some_and(|value| value.is_true());
    let blank = option(2, "blank")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    let text = format!("{text}\n");
    let mut out = BoundedText::default();
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        out.check_time()?;
        if index > 0 {
            out.push('\n')?;
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indent)?;
        }
        out.push_str(line)?;
    }
    Ok(out.into_text())
}

fn partition(text: &str, separator: &str, last: bool) -> Value {
    let found = if last { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((head, tail)) => [head, separator, tail],
        None if last => ["", "", text],
        None => [text, "", ""],
    };
    parts.into_iter().map(Value::from).collect()
}

/// Whether a printed list or mapping is certainly the same as in Python, whose `repr` escapes white
/// space, format and private characters that minijinja does not escape, and writes the exponents of
/// floats differently.
pub(super) fn prints_alike(text: &str) -> bool {
    let bytes = text.as_bytes();
    let exponent = bytes.windows(3).any(|part| {
        part[0].is_ascii_digit() && part[1] == b'e' && (part[2] == b'-' || part[2].is_ascii_digit())
    });
    let escaped = |ch: char| {
        !ch.is_ascii()
            && (ch.is_whitespace()
                || ch.is_control()
                || matches!(ch, '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
                    | '\u{890}'..='\u{891}' | '\u{8e2}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
                    | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}'
                    | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}'
                    | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
                    | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{10ffff}'))
    };
    !exponent && !text.chars().any(escaped)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn strings(value: &Value) -> Vec<String> {
        value.try_iter().unwrap().map(|item| item.to_string()).collect()
    }

    #[test]
    fn split_without_separator_drops_white_space_at_both_ends() {
        assert_eq!(strings(&split(" a \u{1f} b\u{3000}c ", None, -1).unwrap()), ["a", "b", "c"]);
        assert_eq!(strings(&split(" a b  c ", None, 1).unwrap()), ["a", "b  c"]);
        assert!(strings(&split("  ", None, -1).unwrap()).is_empty());
    }

    #[test]
    fn lines_end_where_python_says() {
        assert_eq!(lines("a\r\nb\u{2028}c\n\nd", false), ["a", "b", "c", "", "d"]);
        assert_eq!(lines("a\r\nb\n", true), ["a\r\n", "b\n"]);
    }
}
