//! `tojson` as in Hugging Face's chat templates: Python's `json.dumps` with `ensure_ascii=False`
//! and without HTML escaping. Jinja's own filter escapes `<`, `>` and `&`, which would change token
//! ids.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::written::BoundedText;

/// Maximum nesting of a written value. JSON from a request is bounded by the parser (128 levels);
/// this bounds values that a template builds.
const MAX_DEPTH: usize = 256;

/// Layout options of one `tojson` call; the defaults are Python's.
struct Layout {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The `tojson` filter: `value|tojson(ensure_ascii, indent, separators, sort_keys)`, with each
/// argument by position or by name.
pub(super) fn tojson(value: Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let layout = layout(&args, &kwargs)?;
    kwargs.assert_all_used()?;
    let mut out = BoundedText::default();
    write_value(&mut out, &value, &layout, 0)?;
    Ok(Value::from(out.into_text()))
}

fn layout(args: &[Value], kwargs: &Kwargs) -> Result<Layout, Error> {
    let option = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(index) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = match option(1, "indent")? {
        None => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(i64::try_from(value)?.clamp(0, 64).unsigned_abs() as usize),
        }),
    };
    let (item_separator, key_separator) = match option(2, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let mut parts = pair.try_iter()?.map(|part| part.to_string());
            match (parts.next(), parts.next(), parts.next()) {
                (Some(item), Some(key), None) => (item, key),
                _ => return Err(invalid("tojson: separators must be a pair")),
            }
        }
    };
    Ok(Layout {
        ensure_ascii: option(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        sort_keys: option(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        indent,
        item_separator,
        key_separator,
    })
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn write_value(
    out: &mut BoundedText,
    value: &Value,
    layout: &Layout,
    depth: usize,
) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("tojson: nested too deep"));
    }
    out.check_time()?;
    match value.kind() {
        ValueKind::None => out.push_str("null")?,
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" })?,
        ValueKind::Number => out.push_str(&number(value))?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), layout)?,
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ('[', ']'), items.len(), layout, depth, |out, index| {
                write_value(out, &items[index], layout, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let pairs = pairs(value, layout)?;
            write_items(out, ('{', '}'), pairs.len(), layout, depth, |out, index| {
                write_string(out, &pairs[index].0, layout)?;
                out.push_str(&layout.key_separator)?;
                write_value(out, &pairs[index].1, layout, depth + 1)
            })?;
        }
        // Python's encoder refuses these as well: undefined, generators, objects.
        _ => return Err(invalid("tojson: value is not JSON serializable")),
    }
    Ok(())
}

fn pairs(value: &Value, layout: &Layout) -> Result<Vec<(String, Value)>, Error> {
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let item = value.get_item(&key)?;
        let name = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
            ValueKind::None => "null".to_owned(),
            ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
            ValueKind::Number => number(&key),
            _ => return Err(invalid("tojson: keys must be scalars")),
        };
        pairs.push((name, item));
    }
    if layout.sort_keys {
        pairs.sort_by(|left, right| left.0.cmp(&right.0));
    }
    Ok(pairs)
}

fn write_items(
    out: &mut BoundedText,
    brackets: (char, char),
    len: usize,
    layout: &Layout,
    depth: usize,
    mut item: impl FnMut(&mut BoundedText, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(brackets.0)?;
    for index in 0..len {
        if index > 0 {
            out.push_str(&layout.item_separator)?;
        }
        new_line(out, layout, depth + 1)?;
        item(out, index)?;
    }
    if len > 0 {
        new_line(out, layout, depth)?;
    }
    out.push(brackets.1)
}

fn new_line(out: &mut BoundedText, layout: &Layout, depth: usize) -> Result<(), Error> {
    if let Some(indent) = &layout.indent {
        out.push('\n')?;
        for _ in 0..depth {
            out.push_str(indent)?;
        }
    }
    Ok(())
}

fn write_string(out: &mut BoundedText, text: &str, layout: &Layout) -> Result<(), Error> {
    out.push('"')?;
    for ch in text.chars() {
        match ch {
            '"' => out.push_str("\\\"")?,
            '\\' => out.push_str("\\\\")?,
            '\n' => out.push_str("\\n")?,
            '\r' => out.push_str("\\r")?,
            '\t' => out.push_str("\\t")?,
            '\u{8}' => out.push_str("\\b")?,
            '\u{c}' => out.push_str("\\f")?,
            ch if (ch as u32) < 0x20 || (layout.ensure_ascii && !(' '..='~').contains(&ch)) => {
                let mut units = [0_u16; 2];
                for unit in ch.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"))?;
                }
            }
            ch => out.push(ch)?,
        }
    }
    out.push('"')
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// A float as Python's `repr` and `json.dumps` write it: the shortest digits that read back as the
/// same value, with a sign and at least two digits in the exponent.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Rust's debug format switches to exponents at the same values as Python.
    let text = format!("{value:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(rest) => ('-', rest),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (123456789.125, "123456789.125"),
        ] {
            assert_eq!(float(value), expected);
        }
    }
}
