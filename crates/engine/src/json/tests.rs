//! Tests that the quick pass and the thorough reader agree, for arbitrary and hostile texts.

#![allow(clippy::unwrap_used)]

use std::borrow::Cow;
use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;
use serde_json::value::RawValue;

use super::*;

const NAMES: [&str; 3] = ["a", "b", "type"];

/// At least as many members as the quick pass accepts.
const MEMBERS_MAX: usize = 64;

fn of_body(text: &[u8]) -> Result<Members, ShapeError> {
    Members::of_body(text, MEMBERS_MAX, |_| Ok(()))
}

fn pairs<'a>(text: &'a str, members: &Members) -> Vec<(Cow<'a, str>, &'a str)> {
    members.list.iter().map(|member| (member.name(text), member.raw(text))).collect()
}

fn deep(levels: usize) -> String {
    format!("{}1{}", "[".repeat(levels), "]".repeat(levels))
}

/// Mostly valid values, with every rare construct, and some invalid ones.
fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => "-?[0-9]{1,4}(\\.[0-9]{1,25})?",
        4 => "\"[ -~é本]{0,12}\"",
        4 => prop::sample::select(vec!["null", "true", "false", "[]", "{}"]).prop_map_into(),
        2 => "-?[0-9]{14,25}",
        2 => prop::sample::select(vec!["1e5", "1e999", "-1E-999", "-0", "01", "1.", "1e", "+1"])
            .prop_map_into(),
        2 => "\"(\\\\u[0-9a-fA-F]{4}|\\\\[\"\\\\/bfnrtx]|é|x){0,4}\"",
        1 => prop::sample::select(vec![r#""\ud83d\ude00""#, r#""\ud83d""#, r#""\ude00\ud83d""#])
            .prop_map_into(),
        1 => "[ntf\"\\\\{\\[:,]{0,3}",
        1 => (95usize..135).prop_map(deep),
        1 => "\"x{50,80}\"",
    ];
    let key = prop_oneof![
        6 => "[a-c]{1,2}",
        2 => prop::sample::select(vec!["type", "", "é", "cached_tokens"]).prop_map_into(),
        1 => prop::sample::select(vec![r"\u0061", r"\n", r#"\""#, r"\ud800", "\u{1}"])
            .prop_map_into(),
    ];
    let space = || prop::sample::select(vec!["", "", "", " ", "\n", "\t\r ", "\x0c"]);
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            1 => (prop::collection::vec(inner.clone(), 0..4), space(), space()).prop_map(
                |(items, before, behind)| {
                    format!("[{before}{}{behind}]", items.join(&format!("{before},{behind}")))
                }
            ),
            2 => (prop::collection::vec((key.clone(), inner), 0..4), space(), space()).prop_map(
                |(members, before, behind)| {
                    let member =
                        |(key, value): &(_, _)| format!("{before}\"{key}\"{behind}:{value}");
                    let members: Vec<String> = members.iter().map(member).collect();
                    format!("{{{}{before}}}", members.join(","))
                }
            ),
        ]
    })
}

/// The same as bytes, one of which may be changed, missing or added.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop::sample::select(&b"\"\\{}[]:, 0e.\n\x00\x1f\x7f\x80\xc3\xff"[..]);
    let edit = prop::option::of((any::<prop::sample::Index>(), byte, 0usize..3));
    (value(), edit).prop_map(|(value, edit)| {
        let mut text = value.into_bytes();
        if let Some((place, byte, kind)) = edit
            && !text.is_empty()
        {
            let at = place.index(text.len());
            text.splice(at..at + kind.min(1), (kind < 2).then_some(byte));
        }
        text
    })
}

#[test]
fn no_table_is_made_of_an_object_of_very_many_members() {
    let object = |count: usize| {
        let members: Vec<String> = (0..count).map(|at| format!("\"{at}\":0")).collect();
        format!("{{{}}}", members.join(","))
    };
    assert_eq!(Members::of(&object(4096)).unwrap().list.len(), 4096);
    let refused = Members::of(&object(4097)).unwrap_err();
    assert_eq!(refused.fault, Fault::TooManyMembers { max: 4096 });
    let counted = Members::of_body::<ShapeError>(object(4097).as_bytes(), 5000, |_| Ok(()));
    assert_eq!(counted.unwrap().list.len(), 4097, "a body has its own bound");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn members_that_the_quick_pass_finds_are_those_that_the_thorough_reader_finds(text in text()) {
        let Some((found, is_ascii)) = scan::members(&text) else { return Ok(()) };
        prop_assert_eq!(is_ascii, text.is_ascii());
        let Ok(text) = std::str::from_utf8(&text) else { return Ok(()) };
        prop_assert_eq!(thorough::check(text, MEMBERS_MAX), Ok(found.list.len()));
        prop_assert_eq!(thorough::members(text, None), Ok(found));
    }

    #[test]
    fn members_are_those_that_serde_finds(text in text()) {
        let text = String::from_utf8_lossy(&text);
        let serde = serde_json::from_str::<BTreeMap<String, &RawValue>>(&text);
        match (Members::of(&text), serde) {
            (Ok(members), Ok(serde)) => {
                let mut pairs = pairs(&text, &members);
                pairs.sort();
                let serde: Vec<_> =
                    serde.iter().map(|(key, raw)| (Cow::from(key), raw.get())).collect();
                prop_assert_eq!(pairs, serde);
                for name in NAMES {
                    let bit = mark(name);
                    let is_member = members.list.iter().any(|member| member.name(&text) == name);
                    prop_assert!(!is_member || members.marks & bit != 0);
                }
            }
            (Err(error), serde) => {
                prop_assert!(serde.is_err() || error.fault == Fault::DuplicateKey, "{}", error);
            }
            (Ok(_), Err(error)) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn a_body_is_accepted_if_the_thorough_check_accepts_it(text in text()) {
        let found = of_body(&text);
        let Ok(text) = std::str::from_utf8(&text) else {
            prop_assert_eq!(found.unwrap_err().fault, Fault::NotUtf8);
            return Ok(());
        };
        let checked = thorough::check(text, MEMBERS_MAX);
        prop_assert_eq!(found, checked.and_then(|count| thorough::members(text, Some(count))));
    }

    #[test]
    fn members_are_picked_as_the_thorough_reader_picks_them(text in text()) {
        let picked = pick_from_slice(&text, NAMES);
        let of_slice = serde_json::Deserializer::from_slice(&text);
        prop_assert_eq!(&picked.clone().ok(), &thorough::pick(of_slice, NAMES).ok());
        if let Ok(text) = std::str::from_utf8(&text) {
            prop_assert_eq!(picked, thorough::pick(serde_json::Deserializer::from_str(text), NAMES));
        }
    }

    #[test]
    fn a_value_that_the_quick_pass_builds_is_the_one_that_the_thorough_reader_builds(
        text in text(),
    ) {
        let text = String::from_utf8_lossy(&text);
        if let Some(built) = scan::value(&text) {
            prop_assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), built);
        }
    }

    #[test]
    fn a_string_is_what_serde_reads(raw in "\"(\\\\u[0-9a-f]{4}|\\\\[\"\\\\n]|[ -!#-\\[\\]-~é])*\"") {
        prop_assert_eq!(
            string(&raw).map(Cow::into_owned), serde_json::from_str::<String>(&raw).ok()
        );
    }
}

#[test]
fn a_body_is_refused_with_the_place_of_what_is_wrong() {
    let full = |members: usize| {
        let members = (0..members).map(|at| format!(r#""{at}":0"#)).collect::<Vec<_>>();
        format!("{{{}}}", members.join(","))
    };
    for (text, fault, column) in [
        (format!(r#"{{"a":{}}}"#, deep(127)), Fault::TooDeep, 132),
        (format!(r#"{{"a":{}}}"#, deep(1_000_000)), Fault::TooDeep, 132),
        ("[".repeat(1_000_000), Fault::TooDeep, 128),
        (r#"{"a":1,"b":{"c":1,"c":2}}"#.into(), Fault::DuplicateKey, 21),
        (r#"{"a":1,"\u0061":2}"#.into(), Fault::DuplicateKey, 15),
        (r#"{"a":[{"b":1e999}]}"#.into(), Fault::NumberOutOfRange, 16),
        (r#"{"a":"#.into(), Fault::EndsEarly, 5),
        (r#"{"a" 1}"#.into(), Fault::Syntax, 6),
        (r#"{"a":1} x"#.into(), Fault::Syntax, 9),
        (r#"{"a":"\ud800"}"#.into(), Fault::Syntax, 13),
        ("[1]".into(), Fault::Kind, 1),
        (full(65), Fault::TooManyMembers { max: 64 }, 443),
        (format!(r#"{{"a":[{}]}}"#, full(65)), Fault::TooManyMembers { max: 64 }, 449),
    ] {
        let error = of_body(text.as_bytes()).unwrap_err();
        assert_eq!(error, ShapeError { fault, line: 1, column }, "{:.80}", text);
    }
    let error = of_body(b"{\"a\":\n [\n  1,]}").unwrap_err();
    assert_eq!((error.line, error.column), (3, 5));
    assert!(of_body(format!(r#"{{"a":{}}}"#, deep(126)).as_bytes()).is_ok());
}

#[test]
fn a_table_is_charged_before_it_is_made_and_only_if_it_may_be_long() {
    let charged = |text: &str, answer: Result<(), ShapeError>| {
        let mut charged = None;
        let found = Members::of_body(text.as_bytes(), MEMBERS_MAX, |count| {
            charged = Some(count);
            answer
        });
        (found.map(|members| members.list.len()), charged)
    };
    assert_eq!(charged(r#"{"a":1,"b":2}"#, Ok(())), (Ok(2), None));
    assert_eq!(charged(r#"{"a":1e5,"b":2}"#, Ok(())), (Ok(2), Some(2)));
    let full = ShapeError { fault: Fault::Syntax, line: 7, column: 7 };
    let refused = charged(r#"{"a":1e5,"b":2}"#, Err(full.clone()));
    assert_eq!(refused, (Err(full), Some(2)));
}

/// A body with every kind of byte that an object may have, inside of strings and outside.
fn body(prompt: &str) -> String {
    format!(
        r#" {{"a":[1,22, 333, 4 ,5,-1.5,true,null], "b" :"{prompt}\u00e9\n \"x\\", "z":{{"":[]}} }} "#
    )
}

#[test]
fn a_body_that_is_not_utf8_is_refused_wherever_that_is() {
    for len in [0, 50, 200] {
        let text = body(&"x".repeat(len));
        assert_eq!(of_body(text.as_bytes()).unwrap().list.len(), 3);
        for at in 0..text.len() {
            for wrong in [0x80, 0xc3, 0xff] {
                let mut bytes = text.clone().into_bytes();
                bytes[at] = wrong;
                let error = of_body(&bytes).unwrap_err();
                assert_eq!(error.fault, Fault::NotUtf8, "{wrong:#x} at {at}");
            }
        }
    }
    for (before, after) in (0..130).map(|before| (before, 130 - before)) {
        let text = body(&["x".repeat(before), "é本😀".into(), "x".repeat(after)].concat());
        assert_eq!(of_body(text.as_bytes()).unwrap().list.len(), 3);
    }
}

#[test]
fn a_key_that_is_escaped_is_what_it_says() {
    let text = r#" { "\u0061" : 1e5 ,"\"b,:":[ ] , "c":"\",\"" } "#;
    let members = Members::of(text).unwrap();
    let expected = [("a".into(), "1e5"), ("\"b,:".into(), "[ ]"), ("c".into(), r#""\",\"""#)];
    assert_eq!(pairs(text, &members), expected);
    let keys: Vec<&str> = members.list.iter().map(|member| &text[member.key.clone()]).collect();
    assert_eq!(keys, [r#""\u0061""#, r#""\"b,:""#, "c"]);
}

#[test]
fn unread_members_are_checked_for_syntax_only() {
    let picked = |text: &'static [u8]| pick_from_slice(text, NAMES).map_err(|error| error.fault);
    for text in [
        &br#"{"b":[1 ,2],"a":null,"x":1}"#[..],
        br#"{"b":[1 ,2],"a":null,"x":1e999,"y":{"a":1,"a":2}}"#,
        br#"{"b":[1 ,2],"\u0061":null,"x":1,"x":2}"#,
        b"{\"b\":[1 ,2],\"x\":\"\xff\"}",
    ] {
        assert_eq!(picked(text), Ok([None, Some("[1 ,2]"), None]), "{text:?}");
    }
    for (text, fault) in [
        (&br#"{"a":1,"a":2}"#[..], Fault::DuplicateKey),
        (br#"{"a":1,"\u0061":2}"#, Fault::DuplicateKey),
        (br#"[{"a":1}]"#, Fault::Kind),
        (br#"{"a":1"#, Fault::EndsEarly),
        (br#"{"x":tru}"#, Fault::Syntax),
    ] {
        assert_eq!(picked(text), Err(fault), "{text:?}");
    }
    assert!(pick_from_slice(b"{\"a\":\"\xff\"}", NAMES).is_err(), "it is picked");
}
