//! The YAML that configurations are written in, and its bounds.

use std::fmt::Write;

use crate::support::{VALID, only_problem, parse, problems, valid_but};

#[test]
fn alias_bombs_are_refused() {
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let alias = format!("*a{}", level - 1);
        writeln!(bomb, "a{level}: &a{level} [{}]", vec![alias; 10].join(", ")).unwrap();
    }
    let problems = problems(&bomb);
    let last = problems.last().unwrap();
    assert!(last.message.contains("more than 250000 values"), "{last}");
    assert!((4..7).contains(&last.line), "{last}");
}

#[test]
fn values_are_counted_without_aliases_too() {
    let (line, _, told) = only_problem(&format!("[{}]", "1,\n".repeat(300_000)));
    assert!(told.contains("more than 250000 values"), "{told}");
    assert!(line > 240_000);
}

#[test]
fn deep_nesting_is_refused_early() {
    for open in ["[", "{a: ", "- ", "? "] {
        let (line, column, told) = only_problem(&open.repeat(100));
        assert!(told.contains("nested deeper than 32 levels"), "{told}");
        assert!(line == 1 && column <= 33 * open.len(), "{column}");
        let (line, column, told) = only_problem(&open.repeat(50_000));
        assert!(told.contains("nested deeper") || told.contains("not YAML"), "{told}");
        assert!(line == 1 && column <= 2_000, "{column}");
    }
    // Aliases do not get around it.
    let mut chain = "a0: &a0 [x]\n".to_owned();
    for level in 1..40 {
        writeln!(chain, "a{level}: &a{level} [*a{}]", level - 1).unwrap();
    }
    let problems = problems(&chain);
    assert!(problems.last().unwrap().message.contains("nested deeper"), "{problems:?}");
}

#[test]
fn an_alias_inside_its_own_value_is_refused() {
    let (line, column, told) = only_problem("a: &a\n  b: *a\n");
    assert_eq!((line, column), (2, 6));
    assert!(told.contains("inside the value that it stands for"), "{told}");
    let (_, _, told) = only_problem("a: *nowhere\n");
    assert!(told.contains("this is not YAML"), "{told}");
}

#[test]
fn aliases_stand_for_whole_values() {
    let text = valid_but("timeouts: { connect", "timeouts: &patience { connect")
        .replace("flow: aggregated", "flow: aggregated\n    timeouts: *patience");
    let config = parse(&text).unwrap().config;
    assert_eq!(config.models[1].timeouts.connect, config.models[0].timeouts.connect);
    // A wrong value is told where it is used.
    let text =
        valid_but("hash_seed: 7", "hash_seed: &seed 7").replace("name: small", "name: *seed");
    let (line, column, _) = only_problem(&text);
    assert_eq!((line, column), (32, 11));
}

#[test]
fn a_duplicate_key_is_reported_with_both_places() {
    let (line, column, told) =
        only_problem(&valid_but("hash_seed: 7", "hash_seed: 7\nhash_seed: 8"));
    assert_eq!((line, column), (6, 1));
    assert!(told.starts_with("`hash_seed` is here a second time; the first is at 5:1"), "{told}");
    let (line, column, told) = only_problem(&valid_but("role: both", "role: both, 'role': both"));
    assert_eq!((line, column), (36, 31));
    assert!(told.contains("the first is at 36:19"), "{told}");
}

#[test]
fn keys_that_are_not_texts_are_refused() {
    for key in ["8000: 1", "true: 1", "~: 1", "[a]: 1", "{a: b}: 1", "? [a]\n: 1"] {
        let (line, _, told) = only_problem(&valid_but("hash_seed: 7", key));
        assert_eq!(line, 5, "{told}");
        assert!(told.contains("this key is not a text"), "{told}");
    }
}

#[test]
fn yaml_mistakes_have_places() {
    let cases = [
        ("listen:\n\thttp: 1\n", 2),
        ("listen: {http: 1\nmodels: []\n", 2),
        ("listen: \"abc\n", 1),
        ("a: b: c\n", 1),
        ("listen:\n  http: 1\n grpc: 2\n", 3),
        ("a: 1\n---\nb: 2\n", 2),
        ("models: !!seq []\n", 1),
        ("<<: {}\n", 1),
        ("name: a\0b\n", 1),
        ("", 1),
        ("# nothing\n", 1),
        ("- a\n", 1),
        ("just text\n", 1),
    ];
    for (text, line) in cases {
        let problems = problems(text);
        assert!(problems.iter().any(|problem| problem.line.abs_diff(line) <= 1), "{problems:#?}");
        assert!(problems.iter().all(|problem| problem.column > 0 && !problem.hint.is_empty()));
    }
}

#[test]
fn a_second_document_is_refused_where_it_starts() {
    let (line, column, told) = only_problem(&format!("{VALID}---\nhash_seed: 1\n"));
    assert_eq!((line, column), (VALID.lines().count() + 1, 1));
    assert!(told.contains("a second document"), "{told}");
    assert!(parse(&format!("---\n{VALID}...\n")).is_ok());
}

#[test]
fn marks_line_ends_and_json_are_understood() {
    assert!(parse(&format!("\u{feff}{VALID}")).is_ok());
    assert!(parse(&VALID.replace('\n', "\r\n")).is_ok());
    let with_mark = format!("\u{feff}{}", valid_but("listen:", "listne:"));
    assert_eq!(problems(&with_mark)[0].column, 1);
    let dos = valid_but("hash_seed: 7", "hash_seed: x").replace('\n', "\r\n");
    let (line, column, _) = only_problem(&dos);
    assert_eq!((line, column), (5, 12));
    let json = serde_json::to_string_pretty(&parse(VALID).unwrap().config).unwrap();
    assert!(parse(&json).is_ok(), "{json}");
}
