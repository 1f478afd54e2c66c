//! Builds the value of a text that the quick pass accepts.

use serde_json::{Map, Value};

use super::{DEPTH_MAX, KEYS_MAX, Scan};

/// Parses a whole text as one value; `None` if the thorough reader is needed. Strings are copied in
/// the stretches between their escapes.
pub(in crate::json) fn value(text: &str) -> Option<Value> {
    let mut scan = Scan::new(text.as_bytes());
    let at = scan.space(0);
    let (value, end) = build(&mut scan, text, at, 0)?;
    (scan.space(end) == text.len()).then_some(value)
}

/// Reads a value. Returns it with the position after it.
fn build(scan: &mut Scan<'_>, text: &str, at: usize, depth: usize) -> Option<(Value, usize)> {
    match scan.byte(at) {
        b'"' => string(scan, text, at).map(|(text, end)| (Value::String(text), end)),
        b'{' if depth < DEPTH_MAX => object(scan, text, at, depth + 1),
        b'[' if depth < DEPTH_MAX => list(scan, text, at, depth + 1),
        _ => {
            let end = scan.value(at, DEPTH_MAX, &mut Vec::new())?;
            Some((serde_json::from_str(&text[at..end]).ok()?, end))
        }
    }
}

fn object(scan: &mut Scan<'_>, text: &str, at: usize, depth: usize) -> Option<(Value, usize)> {
    let mut fields = Map::new();
    let mut at = scan.space(at + 1);
    if scan.byte(at) == b'}' {
        return Some((fields.into(), at + 1));
    }
    loop {
        if scan.byte(at) != b'"' {
            return None;
        }
        let (key, end) = string(scan, text, at)?;
        at = scan.space(end);
        if scan.byte(at) != b':' {
            return None;
        }
        at = scan.space(at + 1);
        let (value, end) = build(scan, text, at, depth)?;
        // Duplicate keys are left to the thorough reader.
        if fields.len() >= KEYS_MAX || fields.insert(key, value).is_some() {
            return None;
        }
        at = scan.space(end);
        match scan.byte(at) {
            b',' => at = scan.space(at + 1),
            b'}' => return Some((fields.into(), at + 1)),
            _ => return None,
        }
    }
}

fn list(scan: &mut Scan<'_>, text: &str, at: usize, depth: usize) -> Option<(Value, usize)> {
    let mut items = Vec::new();
    let mut at = scan.space(at + 1);
    if scan.byte(at) == b']' {
        return Some((items.into(), at + 1));
    }
    loop {
        let (item, end) = build(scan, text, at, depth)?;
        items.push(item);
        at = scan.space(end);
        match scan.byte(at) {
            b',' => at = scan.space(at + 1),
            b']' => return Some((items.into(), at + 1)),
            _ => return None,
        }
    }
}

/// Reads and unescapes a string from its opening quote. Returns it with the position after it.
fn string(scan: &mut Scan<'_>, text: &str, at: usize) -> Option<(String, usize)> {
    let mut from = at + 1;
    let mut end = scan.specials.next(from)?;
    if scan.byte(end) == b'"' {
        return Some((text[from..end].to_owned(), end + 1));
    }
    // The final length is unknown until the string is complete. The capacity suits many short
    // strings, and grows fast so that long ones are rarely copied.
    let mut out = String::with_capacity(end - from + 64);
    loop {
        if out.capacity() - out.len() < end - from {
            out.reserve(end - from + 3 * out.len());
        }
        out.push_str(&text[from..end]);
        match scan.byte(end) {
            b'"' => break,
            b'\\' => from = scan.escape(end)?,
            _ => return None,
        }
        out.push(unescape(&text[end..from])?);
        end = scan.specials.next(from)?;
    }
    if out.len() < out.capacity() / 2 {
        out.shrink_to_fit();
    }
    Some((out, end + 1))
}

/// The character of a valid escape.
fn unescape(escape: &str) -> Option<char> {
    Some(match *escape.as_bytes().get(1)? {
        b'b' => '\x08',
        b'f' => '\x0c',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => char::from_u32(u32::from_str_radix(escape.get(2..)?, 16).ok()?)?,
        itself => char::from(itself),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_kind_of_value_is_built() {
        let text =
            r#" {"a":[1,-2.5,true,false,null,[],{}],"b\n\"\\\/\b\f\r\t\u00e9":"x","c":"本"} "#;
        let wanted: Value = serde_json::from_str(text).unwrap();
        assert_eq!(value(text), Some(wanted));
    }

    #[test]
    fn json_for_the_slow_reader_is_not_built() {
        let deep = |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n));
        assert!(value(&deep(90)).is_some());
        for text in
            ["", "[1,]", "{\"a\":1,\"a\":2}", r#""\ud83d\ude00""#, "1 2", "\"\n\"", &deep(200)]
        {
            assert_eq!(value(text), None, "{text}");
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            (-1e6..1e6).prop_map(|number: f64| Value::from((number * 8.0).round() / 8.0)),
            "[a-z\"\\\\é😀\\x00-\\x1f\\x7f]{0,90}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-z\\n]{0,3}", inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn written_json_is_built_as_the_same_value(json in json(), pretty in any::<bool>()) {
            let text = if pretty { format!("{json:#}") } else { json.to_string() };
            prop_assert_eq!(value(&text), Some(json));
        }
    }
}
