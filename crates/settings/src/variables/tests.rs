//! Environment variables in configuration files: types, defaults, escapes, and mistakes with
//! places.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::*;
use crate::file::{CheckedFile, parse_with};
use crate::{Problems, Secret};

const DIALECT: FileProfile =
    FileProfile { variables: true, secret_keys: &["key"], hints: &[], empty: "", too_large: "" };

/// A file with values of all types.
#[derive(Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
struct File {
    name: String,
    names: Vec<String>,
    count: u32,
    ratio: Option<f64>,
    is_on: bool,
    key: Option<Key>,
    inner: Option<Inner>,
    #[serde(deserialize_with = "crate::size::size", serialize_with = "crate::size::size_text")]
    #[schemars(with = "crate::size::SizeText")]
    size: u64,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Inner {
    One { count: u32 },
    Other { count: String },
}

/// A secret that can be compared.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
struct Key(Secret);

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        format!("{:?}", self.0) == format!("{:?}", other.0)
    }
}

fn read(text: &str, environment: &[(&str, &str)]) -> Result<File, Problems> {
    let schema = schemars::schema_for!(File).to_value();
    let lookup = |name: &str| {
        let found = environment.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned()).ok_or(VarError::NotPresent)
    };
    parse_with(&lookup, "f", text, &schema, &DIALECT, |_, _| {})
        .map(|CheckedFile { value, .. }: CheckedFile<File>| value)
}

fn problem(text: &str, environment: &[(&str, &str)]) -> String {
    let problems = read(text, environment).unwrap_err();
    assert_eq!(problems.count(), 1, "{problems}");
    problems.to_string()
}

#[test]
fn a_variable_has_the_type_of_its_key() {
    let environment =
        [("N", "7"), ("R", "0.5"), ("YES", "true"), ("T", "12"), ("S", "64KiB"), ("M", "8")];
    let text = "name: ${T}\nnames: [\"${N}\", \"a-${N}-${R}\"]\ncount: ${N}\nratio: '${R}'\n\
                is_on: ${YES}\nsize: ${S}\ninner: { kind: one, count: \"${M}\" }\n";
    let file = read(text, &environment).unwrap();
    assert_eq!(file.name, "12");
    assert_eq!(file.names, ["7", "a-7-0.5"]);
    assert_eq!((file.count, file.ratio, file.is_on, file.size), (7, Some(0.5), true, 65_536));
    assert_eq!(file.inner, Some(Inner::One { count: 8 }));
    let other = read("inner: { kind: other, count: \"${M}\" }", &environment).unwrap();
    assert_eq!(other.inner, Some(Inner::Other { count: "8".to_owned() }));
}

#[test]
fn a_default_stands_for_a_variable_that_is_unset_or_empty() {
    let text = "name: ${A:-x:$$y}\ncount: ${B:-3}\n";
    for environment in [&[][..], &[("A", ""), ("B", "")]] {
        let file = read(text, environment).unwrap();
        assert_eq!((&*file.name, file.count), ("x:$y", 3));
    }
    assert_eq!(read("name: ${A:-}", &[]).unwrap().name, "");
    assert_eq!(read("name: \"${A:-b}\"", &[("A", "c")]).unwrap().name, "c");
    assert_eq!(read("name: ${A}", &[("A", "")]).unwrap().name, "");
}

#[test]
fn a_dollar_is_doubled_or_stands_alone() {
    for (text, value) in [
        ("$${A}", "${A}"),
        ("a$$b", "a$b"),
        ("$$$$", "$$"),
        ("^a$", "^a$"),
        ("$a", "$a"),
        ("$$${A}", "$x"),
        ("$", "$"),
    ] {
        assert_eq!(read(&format!("name: '{text}'"), &[("A", "x")]).unwrap().name, value, "{text}");
    }
}

#[test]
fn text_that_is_not_a_variable_is_an_error_with_its_place() {
    for text in ["${", "${A", "${}", "${1}", "${A B}", "${A:?b}", "${A:-${B}}", "${A-b}"] {
        let problem = problem(&format!("count: 1\nname: '{text}'\n"), &[("A", "x"), ("B", "y")]);
        assert_eq!(
            problem,
            format!("f:2:7: `name` has a `${{` that begins no variable\n  hint: {HINT}")
        );
    }
    let unset = problem("names:\n- a\n- b${NOPE}c\n", &[]);
    let expected = "f:3:3: `names[1]` needs the variable `NOPE` of the environment, which is not set\n  \
         hint: set NOPE where";
    assert!(unset.starts_with(expected), "{unset}");
    let control = problem("name: ${A}", &[("A", "a\u{1b}[31m")]);
    assert!(control.starts_with("f:1:7: the variable `A` of `name` has the character U+001B"));
}

#[test]
fn a_variable_in_brackets_without_quotes_gets_a_hint() {
    let problem = problem("names: [${A}]\n", &[("A", "x")]);
    assert!(problem.contains("this is not YAML") && problem.contains("\"${NAME}\""), "{problem}");
}

#[test]
fn messages_show_what_the_file_has_and_not_what_the_environment_has() {
    let environment = [("A", "s3cr3t-value")];
    for text in ["count: ${A}", "is_on: \"${A}\"", "size: ${A}", "inner: { kind: \"${A}\" }"] {
        let problem = problem(text, &environment);
        assert!(!problem.contains("s3cr3t"), "{problem}");
        assert!(problem.contains("\"${A}\""), "{problem}");
    }
}

#[test]
fn a_secret_becomes_a_reference_to_its_variable() {
    let file = read("key: ${TOKEN}", &[("TOKEN", "s3cr3t")]).unwrap();
    assert_eq!(file.key, Some(Key(Secret::Env { name: "TOKEN".to_owned() })));
    for text in ["key: a${TOKEN}", "key: ${TOKEN:-b}"] {
        let problems = read(text, &[("TOKEN", "s3cr3t")]).unwrap_err().to_string();
        assert!(problems.contains("can only be a variable as a whole"), "{problems}");
        assert!(!problems.contains("s3cr3t"), "{problems}");
    }
    let inline = problem("key: pa$$word", &[]);
    assert!(inline.contains("never the secret itself") && !inline.contains("pa$"), "{inline}");
    let by_hand = read("key: { kind: env, name: \"${WHICH}\" }", &[("WHICH", "TOKEN")]).unwrap();
    assert_eq!(by_hand.key, file.key);
}

#[test]
fn a_bare_name_is_warned_of() {
    let schema = schemars::schema_for!(File).to_value();
    let lookup = |_: &str| Err(VarError::NotPresent);
    for (text, warns) in [("$HOME/x", true), ("^$A", false), ("$$HOME", false), ("a$b", false)] {
        let text = format!("name: '{text}'");
        let read = parse_with(&lookup, "f", &text, &schema, &DIALECT, |_, _| {});
        let warnings =
            read.map(|CheckedFile { warnings, .. }: CheckedFile<File>| warnings).unwrap();
        assert_eq!(!warnings.is_empty(), warns, "{text}: {warnings:?}");
    }
}

/// The bound on what variables add is reached by aliases of one long value.
#[test]
fn long_values_are_bounded_together() {
    let value = "x".repeat(FILE_MAX_BYTES / 4);
    let read_times = |times: usize| {
        let text = format!("names: [{}]", vec!["\"${A}\""; times].join(", "));
        read(&text, &[("A", &value)])
    };
    assert!(read_times(4).is_ok());
    assert!(read_times(5).unwrap_err().to_string().contains("too large"));
}

proptest! {
    #[test]
    fn a_value_cannot_change_the_structure(value in "[ -~\\n\\t\u{e4}\u{1f600}]{0,40}") {
        let file = read("names: [\"${A}\", b]\nname: ${A}\n", &[("A", &value)]).unwrap();
        prop_assert_eq!(file.names, vec![value.clone(), "b".to_owned()]);
        prop_assert_eq!(file.name, value);
    }

    #[test]
    fn an_escaped_text_is_read_as_the_text(text in "[${}a:-]{0,12}") {
        let quoted = Json::from(&*escaped(&text)).to_string();
        let file = read(&format!("name: {quoted}"), &[]).unwrap();
        prop_assert_eq!(&file.name, &text);
        let json = escaped_json(serde_json::json!({"names": [&text], "name": &text}));
        prop_assert_eq!(read(&json.to_string(), &[]).unwrap().names, vec![text]);
    }

    #[test]
    fn no_text_makes_the_reader_of_variables_panic(text in "\\PC*") {
        let quoted = Json::from(text).to_string();
        let _any = read(&format!("{{\"name\": {quoted}, \"key\": {quoted}}}"), &[]);
    }

    #[test]
    fn parts_in_order_make_the_text(pieces in prop::collection::vec("[a-z ]{1,4}|[$][$]|[$][{][A-Z]{1,3}[}]", 0..6)) {
        let text = pieces.concat();
        let joined: String = parts(&text).unwrap().iter().map(|part| match part {
            Part::Literal("$") => "$$".to_owned(),
            Part::Literal(text) => (*text).to_owned(),
            Part::Variable { name, .. } => format!("${{{name}}}"),
        }).collect();
        prop_assert_eq!(joined, text);
    }
}
