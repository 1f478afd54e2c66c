//! Mistakes in single keys: each is reported at its place, and all are reported together.

use crate::support::{VALID, folder, only_problem, parse, problems, valid_but};

#[test]
fn five_mistakes_give_five_located_messages() {
    let text = "\
listen: { http: ':8000' }
limits:
  drain_grace: 30
  in_flight: 5
models:
  - name: m
    tokenizer: { kind: none }
    flow: agregated
    block_size: \"16\"
    workers: [{ id: w, role: both, url: 'http://w:1' }]
";
    let Err(problems) = parse(text) else { panic!("accepted") };
    assert_eq!(
        problems.to_string(),
        "\
x.yaml:1:17: `listen.http` \":8000\" is not an address
  hint: `0.0.0.0:8000` for all addresses, `127.0.0.1:8000` for this host only
x.yaml:3:16: `limits.drain_grace` must be a duration such as `30s`, not the number 30
  hint: add a unit: `30s` or `30ms`
x.yaml:4:3: `limits` has an unknown key `in_flight`
  hint: did you mean `in_flight_max`?
x.yaml:8:11: `models[0].flow` cannot be \"agregated\"
  hint: did you mean `aggregated`? one of: aggregated, prefill_first, decode_first, auto
x.yaml:9:17: `models[0].block_size` must be `auto`, or a whole number, not the text \"16\"
  hint: write 16 without quotes"
    );
    assert_eq!(problems.count(), 5);
}

/// What people write who come from another tool, or in a hurry.
#[test]
fn common_mistakes_have_hints_of_their_own() {
    let model = "models:\n  - name: m\n    tokenizer: none\n    workers: ['http://w:1']\n";
    let with = |line: &str| format!("{model}    {line}\n");
    for (text, place, hint) in [
        (with("queue: off"), (5, 12), "did you mean `none`?"),
        (with("queue: false"), (5, 12), "did you mean `none`?"),
        (with("policy: round_robin"), (5, 13), "write it as `{ kind: round_robin }`"),
        (with("connector: NixlConnector"), (5, 16), "did you mean `nixl`?"),
        (with("conector: nixl"), (5, 5), "did you mean `connector`?"),
        ("models:\n  - name: m\n\t    tokenizer: none\n".into(), (3, 1), "indent with spaces"),
        (
            "models:\n  - name: m\n    workers:\n      - 'http://a:1'\n     - 'http://b:1'\n"
                .into(),
            (5, 6),
            "begin it in the same column",
        ),
        (format!("auth: [ sk-secret ]\n{model}"), (1, 9), "`splitrail keys new --tenant NAME"),
        (format!("auth: {{ keys: [ sk-secret ] }}\n{model}"), (1, 7), "`splitrail keys new"),
    ] {
        let problems = problems(&text);
        let problem = &problems[0];
        assert_eq!((problem.line, problem.column), place, "{text}: {problem:?}");
        assert!(problem.hint.contains(hint), "{text}: {problem:?}");
        assert!(!format!("{problems:?}").contains("sk-secret"), "{problems:?}");
    }
}

#[test]
fn a_key_mistake_does_not_hide_a_broken_rule() {
    let text = valid_but("hash_seed: 7", "hash_seed: -7").replace("id: d0", "id: p0");
    let problems = problems(&text);
    let places: Vec<_> = problems.iter().map(|problem| (problem.line, problem.column)).collect();
    assert_eq!(places, [(5, 12), (31, 15)], "{problems:#?}");
}

#[test]
fn unknown_keys_are_refused_at_every_level() {
    let sections = [
        ("listen:\n", "listen:\n  nonsense: 1\n", "`listen` has an unknown key `nonsense`"),
        ("hash_seed: 7", "hash_seed: 7\nnonsense: 1", "the configuration has an unknown key"),
        ("limits:\n", "limits:\n  nonsense: 1\n", "`limits` has an unknown key"),
        ("  - name: big\n", "  - name: big\n    nonsense: 1\n", "`models[0]` has an unknown key"),
        ("path: tokenizer", "path: tokenizer, nonsense: 1", "`models[0].tokenizer` has"),
        ("temperature: 0.1", "temperature: 0.1, nonsense: 1", "`models[0].policy` has"),
        ("decode: 0 }", "decode: 0, nonsense: 1 }", "`models[0].retries` has"),
        ("connect: 1s", "connect: 1s, nonsense: 1", "`models[0].timeouts` has"),
        ("path: engine.key", "path: engine.key, nonsense: 1", "`models[0].engine_api_key` has"),
        ("      - id: p0\n", "      - id: p0\n        nonsense: 1\n", "`models[0].workers[0]` has"),
    ];
    for (from, to, message) in sections {
        let (_, _, told) = only_problem(&valid_but(from, to));
        assert!(told.starts_with(message), "{told}");
        assert!(told.contains("known here: "), "{told}");
    }
}

#[test]
fn values_of_the_wrong_type_range_or_form_say_what_is_right() {
    let cases = [
        ("block_size: 16", "block_size: 0", (14, 17), "cannot be 0 -> from 1 to 65536"),
        ("block_size: 16", "block_size: 1e1", (14, 17), "without a fraction or exponent"),
        ("block_size: 16", "block_size: Auto", (14, 17), "`auto`, or a whole number"),
        ("hash_seed: 7", "hash_seed: 1_000", (5, 12), "write 1000 without underscores"),
        ("hash_seed: 7", "hash_seed: 18446744073709551616", (5, 12), "18446744073709551615"),
        ("prefill: 3", "prefill: 11", (22, 25), "from 0 to 10"),
        ("prefill: 3", "prefill: 3, budget_percent: -1", (22, 44), "from 0 to 1000"),
        ("overlap_weight: 2", "overlap_weight: .inf", (21, 49), "from 0 to 1000000"),
        ("overlap_weight: 2", "overlap_weight: .nan", (21, 49), "from 0 to 1000000"),
        ("overlap_weight: 2", "overlap_weight: '2'", (21, 49), "write 2 without quotes"),
        ("drain_delay: 250ms", "drain_delay: '3'", (8, 16), "add a unit: `3s`?"),
        ("drain_delay: 250ms", "drain_delay: 1s1m", (8, 16), "largest first"),
        ("drain_delay: 250ms", "drain_delay: 1 s", (8, 16), "whole numbers with us, ms, s, m or h"),
        ("drain_delay: 250ms", "drain_delay: 169h", (8, 16), "at most 168h"),
        ("drain_delay: 250ms", "drain_delay:", (8, 3), "is left empty"),
        ("http: 0.0.0.0:8000", "http: localhost:80", (2, 9), "`127.0.0.1:80`"),
        ("http: 0.0.0.0:8000", "http: 8000", (2, 9), "`0.0.0.0:8000`"),
        ("http: 0.0.0.0:8000", "http: [::1]:8000", (2, 0), ""),
        ("name: big", "name: ''", (11, 11), "is empty"),
        ("name: big", "name: 7", (11, 11), "put it in quotes"),
        ("name: big", "name: null", (11, 11), "is left empty"),
        ("aliases: [default]", "aliases: default", (12, 14), "must be a list"),
        ("role: prefill", "role: prefil", (27, 15), "did you mean `prefill`?"),
        ("role: prefill", "role: [prefill]", (27, 15), "must be one of"),
        ("id: p0", "id: p/0", (26, 13), "may not hold \"/\""),
        ("kind: huggingface", "kind: hugging_face", (15, 24), "did you mean `huggingface`?"),
        ("kind: huggingface, ", "", (15, 16), "has no `kind`"),
        ("kind: huggingface", "kind: 1", (15, 24), "must be a text"),
        ("{ kind: huggingface, path: tokenizer }", "7", (15, 16), "must be a text, or a mapping"),
        (", path: tokenizer }", " }", (15, 16), "has no `path`"),
    ];
    for (from, to, (line, column), part) in cases {
        let text = valid_but(from, to);
        if part.is_empty() {
            assert_eq!(problems(&text)[0].line, line, "{to}");
            continue;
        }
        let (told_line, told_column, told) = only_problem(&text);
        assert!(told.contains(part), "{to}: {told}");
        assert_eq!((told_line, told_column), (line, column), "{to}: {told}");
    }
}

#[test]
fn secrets_are_never_repeated() {
    let reference = "{ kind: file, path: engine.key }";
    for inline in [
        "sk-very-secret",
        "[sk-very-secret]",
        "{ sk-very-secret }",
        "{ kind: sk-very-secret }",
        "{ kind: env, name: sk-very-secret }",
        "{ kind: env, name: [sk-very-secret] }",
        "{ kind: env, name: x, value: sk-very-secret }",
        "{ kind: file, path: /nonexistent/sk-very-secret }",
    ] {
        for problem in problems(&valid_but(reference, inline)) {
            assert_eq!(problem.line, 24, "{inline}");
            assert!(!problem.to_string().contains("very-secret"), "{problem}");
        }
    }
    let url = valid_but("http://10.0.0.1:8000", "http://user:very-secret@10.0.0.1:8000");
    let (_, _, told) = only_problem(&url);
    assert!(told.contains("has a user or password") && !told.contains("very-secret"), "{told}");
}

#[test]
fn many_mistakes_are_counted_beyond_the_first_hundred() {
    let wrong: String = (0..250).map(|index| format!("nonsense{index}: 1\n")).collect();
    let Err(problems) = parse(&(VALID.to_owned() + &wrong)) else { panic!("accepted") };
    assert_eq!(problems.as_slice().len(), 100);
    assert_eq!(problems.count(), 250);
    assert!(problems.to_string().ends_with("\n... and 150 more"));
}

#[test]
fn messages_are_short_and_hold_no_control_characters() {
    let long = format!("flow: \"\\e[31m{}\"", "x".repeat(10_000));
    let (_, _, told) = only_problem(&valid_but("flow: prefill_first", &long));
    assert!(told.len() < 400 && !told.contains('\u{1b}'), "{told}");
}

#[test]
fn files_are_read_from_their_own_folder() {
    let loaded = splitrail_config::load(&folder().join("valid.yaml"), splitrail_config::Parts::ALL)
        .unwrap_or_else(|p| panic!("{p}"));
    let splitrail_config::TokenizerConfig::Huggingface(splitrail_config::HuggingfaceTokenizer {
        path,
        ..
    }) = &loaded.config.models[0].tokenizer
    else {
        panic!("no tokenizer");
    };
    assert_eq!(path, &folder().join("tokenizer"));
    let secret = loaded.config.models[0].engine_api_key.as_ref().unwrap().resolve().unwrap();
    assert_eq!(secret.expose(), "fixture-engine-key");
    assert_eq!(secret.bearer(), "Bearer fixture-engine-key");
    assert!(!format!("{secret:?} {:?}", secret.bearer()).contains("fixture"));
}

#[test]
fn files_that_cannot_be_read_are_problems_too() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.yaml");
    let told =
        splitrail_config::load(&missing, splitrail_config::Parts::ALL).unwrap_err().to_string();
    assert!(told.starts_with(&format!("{}:1:1: the file cannot be read", missing.display())));

    let latin = folder.path().join("latin.yaml");
    std::fs::write(&latin, b"listen: {}\n# caf\xe9\n").unwrap();
    let told =
        splitrail_config::load(&latin, splitrail_config::Parts::ALL).unwrap_err().to_string();
    assert!(told.starts_with(&format!("{}:2:6: here is a byte", latin.display())), "{told}");

    let large = folder.path().join("large.yaml");
    std::fs::write(&large, vec![b'#'; (4 << 20) + 1]).unwrap();
    assert!(
        splitrail_config::load(&large, splitrail_config::Parts::ALL)
            .unwrap_err()
            .to_string()
            .contains("larger than 4194304 bytes")
    );
}
