//! The shim's configuration: its defaults, flags, secrets and mistakes.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const MINIMAL: &str = "\
engine: http://127.0.0.1:8000
listen: 127.0.0.1:8100
router: [127.0.0.1:8002]
role: decode
id: d0
";

fn problems(text: &str) -> Vec<String> {
    let problems = parse("f", text, Path::new("")).unwrap_err();
    let shown =
        |problem: &Problem| format!("{}:{} {}", problem.line, problem.column, problem.message);
    problems.as_slice().iter().map(shown).collect()
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn a_minimal_file_gets_the_defaults() {
    let config = parse("f", MINIMAL, Path::new("")).unwrap().config;
    assert_eq!(config.role, Role::Decode);
    assert_eq!(config.load_interval.as_millis(), 250);
    assert_eq!(config.drain.grace.as_secs(), 120);
    assert_eq!((config.lease, config.advertise, config.hash_seed), (None, None, None));
}

#[test]
fn a_token_sent_in_clear_text_to_another_host_is_a_warning() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "s3cret").unwrap();
    let token = format!("token: {{ kind: file, path: {:?} }}\n", file.path());
    let away = MINIMAL.replace("[127.0.0.1:8002]", "[routers:8002]");
    for (text, warned) in [
        (format!("{MINIMAL}{token}"), 0),
        (format!("{away}{token}"), 1),
        (format!("{away}{token}tls: {{ ca: {:?} }}\n", file.path()), 0),
        (away.clone(), 0),
    ] {
        let warnings = parse("f", &text, Path::new("")).unwrap().warnings;
        assert_eq!(warnings.len(), warned, "{text}{warnings:?}");
    }
}

#[test]
fn every_mistake_is_reported_with_its_position() {
    let text = "\
engine: https://h:1
listen: 0.0.0.0:8100
router: [http://r:8002, r, r:8002, R:8002]
role: prefil
id: a b
kv_replay: tcp://h:1
load_interval: 1ms
hash_sed: 3
tls: { ca: /nowhere/ca.pem, cert: c.pem }
";
    let found = problems(text);
    for expected in [
        "1:9 `engine` uses https, which is not supported here",
        "2:9 `listen` 0.0.0.0:8100 does not say where routers reach it",
        "3:10 `router[0]` has a scheme",
        "3:25 `router[1]` has no port",
        "3:36 `router[3]` is here a second time",
        "4:7 `role` cannot be \"prefil\"",
        "5:5 `id` may not hold \" \"",
        "6:12 `kv_replay` stands without `kv_events`",
        "7:16 `load_interval` cannot be 1ms",
        "8:1 the configuration has an unknown key `hash_sed`",
        "9:6 `tls` has a certificate without its key, or a key alone",
    ] {
        assert!(found.iter().any(|problem| problem == expected), "{expected}\nin {found:#?}");
    }
    assert!(found.iter().any(|problem| problem.contains("`tls.ca`")), "{found:#?}");
}

#[test]
fn a_token_is_a_reference_and_is_never_shown() {
    let text = format!("{MINIMAL}token: hunter2\n");
    let found = problems(&text);
    assert_eq!(found, ["6:8 `token` is a reference, never the secret itself"]);
    let text = format!("{MINIMAL}token: {{ kind: file, path: /nowhere/token }}\n");
    assert!(problems(&text)[0].contains("`token`: the secret's file cannot be read"));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("token"), "hunter2\n").unwrap();
    let text = format!("{MINIMAL}token: {{ kind: file, path: token }}\n");
    let config = parse("f", &text, folder.path()).unwrap().config;
    let Some(splitrail_settings::Secret::File { path }) = config.token else { panic!() };
    assert_eq!(path, folder.path().join("token"));
}

#[test]
fn flags_and_a_file_give_the_same_configuration() {
    let keys = json!({
        "engine": "http://127.0.0.1:8000", "listen": "127.0.0.1:8100",
        "router": ["127.0.0.1:8002"], "role": "decode", "id": "d0",
    });
    let flags = from_arguments(keys.as_object().unwrap().clone()).unwrap();
    let file = parse("f", MINIMAL, Path::new("")).unwrap();
    assert_eq!(json!(flags.config), json!(file.config));
    let none = from_arguments(Map::new()).unwrap_err();
    assert_eq!(none.count(), 5, "engine, listen, router, role and id");
}

#[test]
fn a_loaded_configuration_can_be_written_and_loaded_again() {
    let text = format!("{MINIMAL}lease: 30s\nconnector: nixl\nhash_seed: 7\n");
    let config = parse("f", &text, Path::new("")).unwrap().config;
    let again = parse("f", &json!(config).to_string(), Path::new("")).unwrap().config;
    assert_eq!(json!(config), json!(again));
}

#[test]
fn the_documentation_lists_all_keys_and_its_examples_are_valid() {
    let document = std::fs::read_to_string(repository().join("docs/shim.md")).unwrap();
    assert!(
        document.contains(&reference_markdown()),
        "docs/shim.md is out of date: replace its table by the output of \
         `splitrail-shim schema --markdown`"
    );
    let example = repository().join("deploy/shim/splitrail-shim.yaml");
    load(&example).unwrap();
    let blocks: Vec<&str> = document.split("```yaml\n").skip(1).collect();
    let files = blocks.iter().filter(|block| block.starts_with("engine:"));
    let mut count = 0;
    for text in files.map(|block| block.split("```").next().unwrap()) {
        parse("docs/shim.md", text, Path::new("")).unwrap();
        count += 1;
    }
    assert!(count > 0);
}

proptest! {
    #[test]
    fn arbitrary_text_causes_no_panic(line in 0_usize..5, text in any::<String>()) {
        let mut lines: Vec<&str> = MINIMAL.lines().collect();
        lines[line] = &text;
        let _outcome = parse("f", &lines.join("\n"), Path::new(""));
    }
}

#[test]
fn a_shim_names_at_least_one_router() {
    for router in ["", "router: []"] {
        let text =
            format!("engine: http://e:1\nlisten: 127.0.0.1:8100\nrole: both\nid: w\n{router}\n");
        let problems = parse("c", &text, Path::new("")).unwrap_err();
        let told = problems.to_string();
        assert!(problems.count() == 1 && told.contains("`router` names no router"), "{told}");
    }
}
