//! Arguments: from the environment, mistyped, and as help shows them.

use serde_json::Value;
use splitrail_tests::binary::built;
use splitrail_tests::pty::OnTerminal;

use super::support::{CONFIG, ROUTER, Run, SHIM, run};

#[test]
fn flags_may_come_from_the_environment() {
    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("splitrail.yaml"), CONFIG).unwrap();
    let folder = files.path();
    let env = [("SPLITRAIL_CONFIG", "splitrail.yaml")];
    let ran = Run { folder, env: &env, ..Run::default() }.with(&["check"]);
    assert!(ran.code == 0 && ran.stdout.ends_with("splitrail.yaml: ok\n"), "{ran:?}");
    let ran = Run { folder, env: &env, ..Run::default() }.with(&["check", "--config", "other"]);
    assert_eq!(ran.code, 66, "a flag counts more than its variable: {ran:?}");

    for (value, is_table) in [("1", true), ("yes", true), ("false", false), ("0", false)] {
        let env = [("SPLITRAIL_SCHEMA_MARKDOWN", value)];
        let ran = Run { env: &env, ..Run::default() }.with(&["schema"]);
        assert_eq!(ran.stdout.starts_with("| key |"), is_table, "{value}");
    }
    let env = [("SPLITRAIL_QUICKSTART_PREFILL", "many")];
    let ran = Run { env: &env, ..Run::default() }.with(&["quickstart"]);
    assert_eq!(ran.code, 64, "{ran:?}");

    let shim = [("SPLITRAIL_SHIM_CONFIG", "none.yaml")];
    let ran = Run { program: SHIM, folder, env: &shim, ..Run::default() }.with(&["check"]);
    assert_eq!(ran.code, 66, "{ran:?}");
    let flags = ["--engine", "http://127.0.0.1:1", "--listen", "nonsense"];
    let ran = Run { program: SHIM, folder, env: &shim, ..Run::default() }.with(&flags);
    assert_eq!(ran.code, 64, "flags count more than a file of the environment: {ran:?}");
    assert!(ran.stderr.contains("\"nonsense\" is not an address"), "{ran:?}");
    let both = [shim[0], ("SPLITRAIL_SHIM_ENGINE", "http://127.0.0.1:1")];
    let ran = Run { program: SHIM, folder, env: &both, ..Run::default() }.with(&[]);
    assert_eq!(ran.code, 64, "two variables conflict: {ran:?}");
    assert!(ran.stderr.contains("cannot be used with"), "{ran:?}");
    let shim = [
        ("SPLITRAIL_SHIM_ENGINE", "http://127.0.0.1:1"),
        ("SPLITRAIL_SHIM_ROUTER", "127.0.0.1:2,127.0.0.1:3"),
        ("SPLITRAIL_SHIM_LISTEN", "nonsense"),
    ];
    let ran = Run { program: SHIM, folder, env: &shim, ..Run::default() }.with(&[]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.stderr.contains("\"nonsense\" is not an address"), "{ran:?}");
    assert!(!ran.stderr.contains("`engine`") && !ran.stderr.contains("`router`"), "{ran:?}");
}

#[test]
fn a_quickstart_whose_port_is_taken_names_the_flag_for_another_one() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for taken in ["--http-port", "--grpc-port", "--admin-port"] {
        let mut arguments = vec!["quickstart", "--prefill", "1", "--decode", "1"];
        for flag in ["--http-port", "--grpc-port", "--admin-port"] {
            arguments.extend([flag, if flag == taken { &port } else { "0" }]);
        }
        let ran = run(&arguments);
        let hint = format!("name another port with {taken}, or 0 for any free port");
        assert!(ran.code != 0 && ran.stderr.contains(&hint), "{ran:?}");
        assert!(ran.stderr.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{ran:?}");
    }
}

#[test]
fn help_names_the_variables_and_not_their_values() {
    let secret = "http://user:s3cr3t@router:9090";
    let env = [("SPLITRAIL_ADMIN", secret), ("SPLITRAIL_ADMIN_KEY", "s3cr3t")];
    for command in ["status", "explain", "drain"] {
        let ran = Run { env: &env, ..Run::default() }.with(&[command, "--help"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.stdout.contains("[env: SPLITRAIL_ADMIN]"), "{ran:?}");
        assert!(ran.stdout.contains("[env: SPLITRAIL_ADMIN_KEY_FILE]"), "{ran:?}");
        assert!(!ran.stdout.contains("s3cr3t"), "{ran:?}");
    }
    let ran = Run { env: &env, ..Run::default() }.with(&["status"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.stderr.contains("***@router") && !ran.stderr.contains("s3cr3t"), "{ran:?}");
}

#[test]
fn options_of_all_commands_are_in_the_help_of_the_program_alone() {
    for (program, commands) in [
        (ROUTER, &["serve", "check", "status", "replay", "keys", "version"][..]),
        (SHIM, &["check", "schema", "version"]),
    ] {
        let run = Run { program, ..Run::default() };
        let top = run.with(&["--help"]).stdout;
        assert_eq!(top.matches("--log-format <").count(), 1, "{top}");
        for command in commands {
            let help = run.with(&[command, "--help"]).stdout;
            assert!(!help.contains("--log-format <"), "{help}");
            let ran = run.with(&[command, "--log-format", "xml"]);
            assert_eq!(ran.code, 64, "{ran:?}");
            assert!(ran.stderr.contains("json"), "it is accepted everywhere: {ran:?}");
        }
    }
}

#[test]
fn a_mistyped_command_or_flag_is_answered_with_the_one_that_was_meant() {
    for (program, arguments, meant) in [
        (ROUTER, &["chekc"][..], "'check'"),
        (ROUTER, &["serve", "--confg", "x"], "'--config'"),
        (ROUTER, &["versoin"], "'version'"),
        (SHIM, &["--lissten", "x"], "'--listen'"),
    ] {
        let ran = Run { program, ..Run::default() }.with(arguments);
        assert_eq!(ran.code, 64, "{ran:?}");
        assert!(ran.stderr.contains(meant) && ran.stderr.contains("tip:"), "{ran:?}");
    }
}

#[test]
fn usage_errors_are_records_where_logs_are_json() {
    let by_flag = [&["--log-format", "json", "serve"][..], &["serve", "--log-format=json", "x"]];
    for arguments in by_flag {
        let ran = run(arguments);
        assert_eq!(ran.code, 64, "{ran:?}");
        let record: Value = serde_json::from_str(&ran.stderr).unwrap();
        assert_eq!(record["fields"]["exit_code"], 64, "{record}");
    }
    let env = [("SPLITRAIL_LOG_FORMAT", "json")];
    let ran = Run { env: &env, ..Run::default() }.with(&["serve"]);
    let record: Value = serde_json::from_str(&ran.stderr).unwrap();
    assert!(record["fields"]["message"].as_str().unwrap().contains("--config"), "{record}");
}

/// The codes of docs/cli.md, for files.
#[test]
fn files_that_cannot_be_read_or_written_have_the_same_codes_everywhere() {
    let files = tempfile::tempdir().unwrap();
    let folder = files.path();
    std::fs::write(folder.join("splitrail.yaml"), CONFIG).unwrap();
    for (code, arguments) in [
        (66, &["check", "--config", "none"][..]),
        (66, &["serve", "--config", "none"]),
        (66, &["replay", "--trace", "none"]),
        (66, &["keys", "list", "--file", "none"]),
        (66, &["usage", "--ledger", "none"]),
        (66, &["explain", "--request", "none"]),
        (74, &["keys", "new", "--role", "read", "--file", "none/keys.yaml"]),
        (74, &["serve", "--config", "splitrail.yaml", "--ready-file", "none/ready.json"]),
        (
            74,
            &[
                "sim-engine",
                "--http-port",
                "0",
                "--kv-events-port",
                "0",
                "--kv-replay-port",
                "0",
                "--ready-file",
                "none/ready.json",
            ],
        ),
        (74, &["man", "--output", "splitrail.yaml/man1"]),
    ] {
        let ran = Run { folder, ..Run::default() }.with(arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
    }
}

#[test]
fn explain_names_all_that_it_can_explain() {
    let ran = run(&["explain"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.stderr.contains("--request <FILE>|--request-id <ID>"), "{ran:?}");
    let ran = run(&["explain", "--request", "x", "--request-id", "y"]);
    assert_eq!(ran.code, 64, "{ran:?}");
}

#[test]
fn an_unreachable_admin_listener_is_reported_with_its_address_and_a_hint() {
    let input = "{\"model\": \"sim\", \"prompt\": \"a\"}";
    let ran = Run { input, ..Run::default() }.with(&[
        "explain",
        "--request",
        "-",
        "--admin",
        "127.0.0.1:1",
    ]);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("nothing listens at 127.0.0.1:1\n  hint: "), "{ran:?}");
}

/// The mistakes of `check`, the help, and nothing of either with colours where nobody sees them.
#[tokio::test]
async fn terminals_get_colours_and_pipes_do_not() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("bad.yaml").display().to_string();
    std::fs::write(&path, CONFIG.replace("aggregated", "sideways")).unwrap();
    let escape = "\x1b[1m";
    for arguments in [&["--help"][..], &["check", "--config", &path], &["chekc"]] {
        let ran = run(arguments);
        assert!(!ran.stdout.contains('\x1b') && !ran.stderr.contains('\x1b'), "{ran:?}");
        for (env, has_colours) in [(&[][..], true), (&[("NO_COLOR", "1")], false)] {
            let mut terminal = OnTerminal::start(&built(ROUTER), arguments, env, (100, 60));
            terminal.ended().await;
            splitrail_tests::cluster::eventually("the output is there", async || {
                ["Usage", "hint:", "tip:"].iter().any(|text| terminal.output().contains(text))
            })
            .await;
            let output = terminal.output();
            assert_eq!(output.contains(escape), has_colours, "{arguments:?} {env:?}: {output:?}");
        }
    }
}
