//! `splitrail keys` and `splitrail usage`, as users run them.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// The exit code and the output of a command.
fn run(arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_splitrail"));
    let output = command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null()).output();
    let output = output.unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text.trim_end().to_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_key_is_made_listed_and_revoked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.yaml");
    let file = text(&file);
    let new = ["keys", "new", "--tenant", "acme", "--file", file, "--note", "a laptop"];
    let (code, told) = run(&[&new[..], &["--json"]].concat());
    assert_eq!(code, 0, "{told}");
    let made: Value = serde_json::from_str(&told).unwrap();
    let (key, id) = (made["key"].as_str().unwrap(), made["entry"]["id"].as_str().unwrap());
    assert_eq!(run(&["keys", "new", "--role", "admin", "--file", file, "--expires", "30"]).0, 0);
    let written = std::fs::read_to_string(file).unwrap();
    assert!(!written.contains(key) && written.contains(id), "{written}");
    let keys = splitrail_config::keys::load(Path::new(file)).unwrap().keys;
    assert_eq!(keys.len(), 2);
    assert_eq!(json!(keys[0]), made["entry"]);
    assert!(keys[1].expires.is_some());

    let (code, listed) = run(&["keys", "list", "--file", file]);
    assert_eq!(code, 0);
    assert!(listed.contains("tenant acme") && listed.contains("a laptop"), "{listed}");
    assert!(!listed.contains(&keys[0].sha256), "a list shows no hashes");

    assert_eq!(run(&["keys", "revoke", "--file", file, "k-unknown"]).0, 65);
    assert_eq!(run(&["keys", "revoke", "--file", file, id]).0, 0);
    let left = splitrail_config::keys::load(Path::new(file)).unwrap().keys;
    assert_eq!(left.iter().map(|key| &key.id).collect::<Vec<_>>(), [&keys[1].id]);
    assert_eq!(run(&["keys", "revoke", "--file", file, &keys[1].id]).0, 0);
    assert!(splitrail_config::keys::load(Path::new(file)).unwrap().keys.is_empty());
}

/// The owner, the group and the permissions of a file.
fn access(file: &str) -> (u32, u32, u32) {
    let file = std::fs::metadata(file).unwrap();
    (file.uid(), file.gid(), file.mode() & 0o777)
}

#[test]
fn a_router_of_another_user_can_read_the_file_after_each_change() {
    const OTHER: u32 = 65_534;
    let folder = tempfile::tempdir().unwrap();
    let own = std::fs::metadata(folder.path()).unwrap();
    // Only root can give files to others.
    let is_root = own.uid() == 0;
    let group = if is_root { OTHER } else { own.gid() };
    chown(folder.path(), None, Some(group)).unwrap();
    let file = folder.path().join("keys.yaml");
    let file = text(&file);
    let new = ["keys", "new", "--tenant", "acme", "--file", file];
    assert_eq!(run(&new).0, 0);
    assert_eq!(access(file), (own.uid(), group, 0o640), "the group of the folder reads a new file");
    let owner = if is_root { OTHER } else { own.uid() };
    chown(file, Some(owner), None).unwrap();
    std::fs::set_permissions(file, Permissions::from_mode(0o400)).unwrap();
    assert_eq!(run(&new).0, 0);
    let id = splitrail_config::keys::load(Path::new(file)).unwrap().keys[0].id.clone();
    assert_eq!(run(&["keys", "revoke", "--file", file, &id]).0, 0);
    assert_eq!(access(file), (owner, group, 0o400));
}

#[test]
fn a_link_to_a_file_of_keys_stays_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let [file, link] = ["keys.yaml", "link.yaml"].map(|name| folder.path().join(name));
    std::fs::write(&file, "keys: []\n").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(run(&["keys", "new", "--tenant", "acme", "--file", text(&link)]).0, 0);
    assert!(link.is_symlink());
    assert_eq!(splitrail_config::keys::load(&file).unwrap().keys.len(), 1);
}

#[test]
fn a_printed_entry_can_be_put_into_a_file() {
    let (code, told) = run(&["keys", "new", "--tenant", "acme"]);
    assert_eq!(code, 0, "{told}");
    let entry = told.lines().last().unwrap();
    let file = format!("keys:\n{entry}\n");
    assert_eq!(splitrail_config::keys::parse("keys.yaml", &file).unwrap().keys.len(), 1);
    assert_eq!(run(&["keys", "new"]).0, 64, "a key is for someone");
    assert_eq!(run(&["keys", "new", "--tenant", "a", "--role", "read"]).0, 64);
}

#[test]
fn usage_sums_the_ledger_and_its_rotated_files() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.jsonl");
    let line = |tenant: Value, outcome: &str, ended_unix_ms: u64| {
        // Of a request that failed, nothing counts.
        let counts = |tokens: u64| if outcome == "ok" { json!(tokens) } else { Value::Null };
        let line = json!({
            "version": 1, "request_id": "r", "tenant": tenant, "model": "m", "endpoint": "chat",
            "session": if ended_unix_ms == 1 { json!("s-1") } else { Value::Null },
            "flow": "aggregated", "outcome": outcome, "arrived_unix_ms": 1,
            "ended_unix_ms": ended_unix_ms, "prompt_tokens": counts(100), "cached_tokens": counts(16),
            "completion_tokens": counts(4), "wasted_prompt_tokens": 0, "told": null, "prompts": [],
        });
        format!("{line}\n")
    };
    let now = 4_102_444_800_000; // 2100
    let newer = [
        line(json!("acme"), "ok", now),
        line(json!("acme"), "decode_lost", now),
        line(Value::Null, "ok", now),
        format!("{}\n", json!({"version": 1, "lost_records": 3, "unix_ms": now})),
        format!(
            "{}\n",
            json!({
                "model": "part", "endpoint": "completions", "outcome": "ok", "ended_unix_ms": now,
                "prompt_tokens": 20, "cached_tokens": null, "completion_tokens": null,
                "prompts": [
                    {"prompt_tokens": 10, "cached_tokens": 8, "completion_tokens": 5},
                    {"prompt_tokens": 10, "cached_tokens": 3, "completion_tokens": 6, "further_sample": true},
                    {"prompt_tokens": 10, "cached_tokens": null, "completion_tokens": null},
                ],
            })
        ),
        "{\"half a l".to_owned(),
    ];
    std::fs::write(&ledger, newer.concat()).unwrap();
    let old = [line(json!("acme"), "ok", now), line(json!("acme"), "ok", 1)];
    std::fs::write(folder.path().join("ledger.jsonl.1"), old.concat()).unwrap();
    let sums = |more: &[&str]| -> Value {
        let (code, told) =
            run(&[&["usage", "--ledger", text(&ledger), "--json"][..], more].concat());
        assert_eq!(code, 0, "{told}");
        serde_json::from_str(&told).unwrap()
    };
    let all = sums(&[]);
    let acme = &all["usage"][2];
    let part = &all["usage"][1];
    let figures = ["prompt_tokens", "cached_tokens", "completion_tokens", "incomplete_requests"];
    assert_eq!(figures.map(|figure| part[figure].as_u64()), [20, 8, 11, 1].map(Some));
    assert_eq!(acme["incomplete_requests"], 0);
    assert_eq!((&acme["tenant"], &acme["model"]), (&json!("acme"), &json!("m")));
    assert_eq!((&acme["requests"], &acme["other_requests"]), (&json!(3), &json!(1)));
    assert_eq!(acme["prompt_tokens"], 300);
    assert_eq!(all["usage"][0]["tenant"], Value::Null);
    assert_eq!((&all["lost_records"], &all["unreadable_lines"]), (&json!(3), &json!(1)));
    assert_eq!(sums(&["--since", "1d"])["usage"][2]["requests"], 2, "an old request");
    let apart = sums(&["--by-session"]);
    let row = |row: &Value| (row["session"].clone(), row["prompt_tokens"].clone());
    let rows = apart["usage"].as_array().unwrap().iter().filter(|row| row["tenant"] == "acme");
    assert_eq!(
        rows.map(row).collect::<Vec<_>>(),
        [(Value::Null, json!(200)), (json!("s-1"), json!(100))]
    );
    let table = run(&["usage", "--ledger", text(&ledger), "--by-session"]).1;
    assert!(table.lines().any(|line| line.ends_with("  s-1")), "{table}");
    assert!(run(&["usage", "--ledger", text(&ledger)]).1.contains("3 records are missing"));
    assert_eq!(run(&["usage", "--ledger", "/nonexistent"]).0, 66);
    assert_eq!(run(&["usage", "--ledger", text(&ledger), "--since", "soon"]).0, 64);
}
