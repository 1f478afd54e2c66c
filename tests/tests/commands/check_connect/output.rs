//! What the command prints, and its exit codes.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::Value;
use splitrail_sim::{SimConfig, UsageReport};
use splitrail_tests::binary::built;

use super::support::{Pair, checked, decode, prefill, printed};

#[tokio::test]
async fn the_text_says_for_each_worker_what_is_right_and_what_to_change() {
    let pair = Pair::of(SimConfig { usage_report: UsageReport::Null, ..prefill() }, decode()).await;
    let printed = printed(&pair.yaml(), &["--connect"]).await;
    let text = &printed.text;
    assert_eq!(printed.code, Some(0), "{text}");
    let events = pair.prefill.kv_events_endpoint().unwrap();
    let replay = pair.prefill.kv_replay_endpoint().unwrap();
    for line in [
        "model sim",
        &format!("  p0  prefill  {}", pair.prefill.url()),
        "    ok       the engine serves sim, version 0.32.0, block size 16, up to 32768 tokens",
        &format!("    ok       KV events arrive ({events}), and can be replayed ({replay})"),
        "    ok       the engine shows connector nixl",
        "    ok       a prefill returns a hand-off",
        "    ok       KV arrives from p0",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
    assert!(text.contains("    warning  details_off: "), "{text}");
    assert!(text.contains("             remedy: start the engine with `--enable"), "{text}");
    let last = text.trim_end().lines().last().unwrap();
    assert!(last.ends_with("splitrail.yaml: ok: 2 workers, 0 faults, 1 warning"), "{last}");
}

#[tokio::test]
async fn a_file_with_a_mistake_is_not_connected_to() {
    let pair = Pair::sound().await;
    let yaml = pair.yaml_with("block_size: 16\nretries: { prefil: 1 }");
    let printed = printed(&yaml, &["--connect", "--json"]).await;
    assert_eq!(printed.code, Some(78), "{}", printed.text);
    let json: Value = serde_json::from_str(&printed.text).unwrap();
    assert_eq!(json["models"], Value::Null);
    let problem = &json["problems"][0];
    assert_eq!(problem["severity"], "fault");
    assert!(problem["line"].as_u64() > Some(1) && problem["hint"].as_str().is_some(), "{json:#}");
    assert!(pair.prefill.requests().is_empty() && pair.decode.requests().is_empty());
}

#[tokio::test]
async fn strict_refuses_a_warning_of_the_configuration_and_standard_input_is_read() {
    // A listener for everyone, without credentials, is a warning.
    let yaml = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0, fleet: 127.0.0.1:0 }
models:
  - { name: m, tokenizer: { kind: none }, flow: aggregated, discovery: [{ kind: shim }] }
";
    let run = |flags: &[&str]| {
        let mut command = Command::new(built("splitrail"));
        command.args(["check", "-"]).args(flags).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(yaml.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = run(&[]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("warning: stdin:1:") && text.ends_with("stdin: ok\n"), "{text}");
    let (code, text) = run(&["--strict"]);
    assert_eq!(code, Some(78), "{text}");
    assert!(text.ends_with("stdin: not ok: 1 warning, which --strict refuses\n"), "{text}");
    // Shims attach to running routers.
    let (code, text) = run(&["--connect"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("source_not_asked"), "{text}");
}

#[tokio::test]
async fn the_documented_members_are_there() {
    let pair = Pair::sound().await;
    let documented = include_str!("../../../../docs/cli.md");
    let example = documented.split("```json\n").nth(1).unwrap().split("```").next().unwrap();
    let example: Value = serde_json::from_str(example).unwrap();
    // A finding, so that the lists are not empty.
    let replay = format!(", kv_replay: \"{}\"", pair.prefill.kv_replay_endpoint().unwrap());
    let result = checked(&pair.yaml().replace(&replay, "")).await;
    let names =
        |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let both = |path: &str| {
        let [ours, theirs] =
            [&result.json, &example].map(|json| names(json.pointer(path).unwrap()));
        assert_eq!(ours, theirs, "{path}");
    };
    for path in [
        "",
        "/models/0",
        "/models/0/workers/0",
        "/models/0/workers/0/facts",
        "/models/0/workers/0/findings/0",
    ] {
        both(path);
    }
}
