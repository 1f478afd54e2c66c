//! Exit codes, which follow `sysexits.h`.

use std::net::TcpListener;
use std::process::Command;

/// Runs the shim. Returns its exit code and its output.
fn run(arguments: &[&str]) -> (i32, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_splitrail-shim")).args(arguments).output().unwrap();
    let mut text = String::from_utf8(output.stdout).unwrap();
    text.push_str(std::str::from_utf8(&output.stderr).unwrap());
    (output.status.code().unwrap(), text)
}

#[test]
fn every_mistake_on_the_command_line_is_reported() {
    let (code, text) = run(&["--engine", "http://h:1", "--listen", "0.0.0.0:1", "--role", "x"]);
    assert_eq!(code, 64);
    for key in ["`listen`", "`role`", "`router`", "`id`"] {
        assert!(text.contains(key), "{key} in {text}");
    }
    assert_eq!(run(&["--bogus"]).0, 64);
    assert_eq!(run(&["--config", "f.yaml", "--id", "x"]).0, 64);
}

#[test]
fn problems_of_a_file_are_reported_with_their_position() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shim.yaml");
    let name = path.to_str().unwrap();
    let text =
        "engine: http://127.0.0.1:1\nlisten: 127.0.0.1:0\nrouter: [h:1]\nrole: both\nid: w\n";
    std::fs::write(&path, text).unwrap();
    assert_eq!(run(&["check", "--config", name]), (0, format!("{name}: ok\n")));
    std::fs::write(&path, text.replace("id: w", "ids: w")).unwrap();
    for arguments in [&["check", "--config", name][..], &["--config", name]] {
        let (code, text) = run(arguments);
        assert_eq!(code, 78);
        assert!(text.contains(&format!("{name}:5:1: ")), "{text}");
    }
}

#[test]
fn an_occupied_address_is_a_system_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, text) = run(&[
        "--engine",
        "http://127.0.0.1:1",
        "--listen",
        &address,
        "--router",
        "127.0.0.1:1",
        "--role",
        "both",
        "--id",
        "w",
    ]);
    assert_eq!(code, 71);
    assert!(text.contains(&address), "{text}");
}

#[test]
fn help_and_schema_exit_with_zero() {
    assert_eq!(run(&["--help"]).0, 0);
    let (code, text) = run(&["schema"]);
    assert_eq!(code, 0);
    let schema: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(schema["title"], "Splitrail shim configuration");
}
