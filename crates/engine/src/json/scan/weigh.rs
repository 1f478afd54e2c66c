//! Counts the values of a JSON text without building any.

use super::words::{BLOCK, Specials};

/// The numbers of values in a JSON text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// Entries of the list, or members of the object, that is the whole text; 1 for any other
    /// value.
    pub entries: usize,
    /// Values at all depths: strings, numbers, `true`, `false`, `null`, lists and objects.
    pub values: usize,
    /// Members of all objects.
    pub members: usize,
    /// Objects.
    pub objects: usize,
    /// The levels at which the values are, added up: the number of indentations if the text is
    /// printed with one value on each line.
    pub levels: usize,
}

/// Counts the values of a JSON text. Strings are skipped 64 bytes at a time. The counts of a text
/// that is not JSON are meaningless. Counting stops once there are more than `values_max` values.
#[must_use]
pub fn weigh(text: &[u8], values_max: usize) -> Weight {
    let mut weight = Weight { entries: 1, values: 1, ..Weight::default() };
    let mut specials = Specials::new(text);
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(byte) = text.get(at) {
        at += 1;
        match byte {
            b'"' => at = behind_string(&mut specials, text, at),
            // The bracket counts the first entry; empty lists, for which this is wrong, are rare.
            b'[' | b'{' => {
                weight.values += 1;
                weight.objects += usize::from(*byte == b'{');
                depth += 1;
                weight.levels += depth;
            }
            // The bracket has its own line.
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                weight.levels += depth;
            }
            b',' => {
                weight.values += 1;
                weight.levels += depth;
                weight.entries += usize::from(depth == 1);
            }
            b':' => weight.members += 1,
            _ => {}
        }
        if weight.values > values_max {
            break;
        }
    }
    weight
}

/// The position after a string; `at` is its first byte after the opening quote.
///
/// Long stretches without a special byte are left to `memchr`, which uses the widest registers of
/// the processor and reads them with a quarter of the instructions; where special bytes are close
/// together, each call of it would cost more than a mask of 64 bytes.
fn behind_string(specials: &mut Specials<'_>, text: &[u8], mut at: usize) -> usize {
    let mut is_sparse = true;
    loop {
        let rest = text.get(at..).unwrap_or_default();
        let next = match is_sparse {
            true => memchr::memchr2(b'"', b'\\', rest).map(|hop| at + hop),
            false => specials.next(at),
        };
        let Some(special) = next else { return text.len() };
        is_sparse = special - at >= BLOCK;
        at = match text[special] {
            b'"' => return special + 1,
            b'\\' => special + 2,
            _ => special + 1,
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn of(text: &str) -> Weight {
        weigh(text.as_bytes(), usize::MAX)
    }

    #[test]
    fn entries_are_those_of_the_outer_list() {
        for (text, entries) in [
            ("[1,[2,3],4]", 3),
            (r#"[{"a":1,"b":[1,2]},{"a":",\",[{"}]"#, 2),
            (r#"["\ud83d\ude00,\\",2]"#, 2),
            (r#""a,b""#, 1),
            ("7", 1),
        ] {
            assert_eq!(of(text).entries, entries, "{text}");
        }
    }

    #[test]
    fn levels_are_the_indentations_of_a_printed_text() {
        for text in ["7", "[1]", "[1,[2,3],4]", r#"[{"a":1,"b":[1,2]},{"a":",[{"}]"#, "[[[[0,0]]]]"]
        {
            let value: Value = serde_json::from_str(text).unwrap();
            let printed = serde_json::to_string_pretty(&value).unwrap();
            let spaces = printed.lines().map(|line| line.len() - line.trim_start().len());
            assert_eq!(of(text).levels * 2, spaces.sum::<usize>(), "{text}");
        }
    }

    #[test]
    fn counting_ends_where_there_are_too_many() {
        let text = format!("[0{}]", ",0".repeat(10_000));
        assert_eq!(weigh(text.as_bytes(), 100).values, 101);
    }

    #[test]
    fn counting_ends_on_text_that_is_not_json() {
        for text in ["", "\"", "\"\\", "]]]", "[\"a", "\"\n\u{1}"] {
            let _any = of(text);
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<i32>().prop_map(Value::from),
            "[a,:{}\\[\\]\"\\\\é😀\n]{0,80}".prop_map(Value::from),
            "([a,:{\\[é]{50,150}[\"\\\\\n]{0,3}){0,4}".prop_map(Value::from),
            Just(Value::Null),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 1..5).prop_map(Value::from),
                prop::collection::btree_map("[a,:\"é]{1,9}", inner, 1..5)
                    .prop_map(Value::from_iter),
            ]
        })
    }

    /// Numbers of values, members and objects in a value without empty lists and objects.
    fn count(value: &Value) -> (usize, usize, usize) {
        let sum = |items: &mut dyn Iterator<Item = &Value>| {
            items.map(count).fold((1, 0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1, sum.2 + of.2))
        };
        match value {
            Value::Array(items) => sum(&mut items.iter()),
            Value::Object(members) => {
                let (values, inner, objects) = sum(&mut members.values());
                (values, inner + members.len(), objects + 1)
            }
            _ => (1, 0, 0),
        }
    }

    proptest! {
        #[test]
        fn counted_values_equal_those_that_a_parser_builds(value in value()) {
            let (values, members, objects) = count(&value);
            for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
                let weight = of(&text);
                prop_assert_eq!(
                    (weight.values, weight.members, weight.objects), (values, members, objects)
                );
            }
        }
    }
}
