//! The notation of configuration files: variables of the environment, sizes and durations.

use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;

use super::support::{CONFIG, Ran, Run, SHIM};

/// What `check` says of a text.
fn check(program: &str, text: &str, env: &[(&str, &str)]) -> Ran {
    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("f.yaml"), text).unwrap();
    Run { program, folder: files.path(), env, ..Run::default() }
        .with(&["check", "--config", "f.yaml"])
}

fn router(text: &str, env: &[(&str, &str)]) -> Ran {
    check("splitrail", text, env)
}

#[test]
fn values_are_filled_from_the_environment() {
    let text = CONFIG
        .replace("name: sim", "name: ${MODEL}")
        .replace("block_size: 16", "block_size: ${BLOCK:-32}")
        .replace("http://127.0.0.1:1", "http://${HOST}:${PORT}");
    let env = [("MODEL", "a: [b"), ("HOST", "127.0.0.1"), ("PORT", "1")];
    let ran = router(&text, &env);
    assert!(ran.code == 0 && ran.stdout.ends_with("f.yaml: ok\n"), "{ran:?}");
    let ran = router(&text, &env[..2]);
    assert_eq!(ran.code, 78, "{ran:?}");
    let told = "f.yaml:8:36: `models[0].workers[0].url` needs the variable `PORT` of the environment, \
                which is not set\n  hint: set PORT ";
    assert!(ran.stderr.starts_with(told), "{ran:?}");
    assert_eq!(ran.stderr.lines().count(), 2, "what follows from it is not told: {ran:?}");
    let ran = router(&CONFIG.replace("name: sim", "name: ${MODEL"), &env);
    assert!(ran.stderr.starts_with("f.yaml:3:11: `models[0].name` has a `${`"), "{ran:?}");
    assert_eq!(ran.code, 78);
}

#[test]
fn a_shim_s_file_is_filled_alike() {
    let text = "engine: http://127.0.0.1:${PORT}\nlisten: 127.0.0.1:0\nadvertise: http://127.0.0.1:9\n\
                router: [\"${ROUTER}\"]\nrole: ${SHIM_ROLE:-decode}\nid: d0\n\
                limits: { change_log_size_max: 4MiB }\n";
    let env = [("PORT", "8000"), ("ROUTER", "127.0.0.1:8002")];
    let ran = check(SHIM, text, &env);
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = check(SHIM, text, &[env[0], env[1], ("SHIM_ROLE", "chief-s3cr3t")]);
    assert_eq!(ran.code, 78, "{ran:?}");
    assert!(
        ran.stderr.contains("\"${SHIM_ROLE:-decode}\"") && !ran.stderr.contains("s3cr3t"),
        "{ran:?}"
    );
}

#[tokio::test]
async fn a_secret_of_the_environment_is_shown_nowhere() {
    const SECRET: &str = "s3cr3t-of-the-engine";
    let config = CONFIG.replace("name: sim", "name: ${MODEL}").replace(
        "block_size: 16",
        "engine_api_key: ${ENGINE_KEY}\n    aliases: ['$${x}', 'a$$$$b']",
    );
    let env = [("ENGINE_KEY", SECRET), ("MODEL", "sim"), ("RUST_LOG", "trace"), ("NO_COLOR", "1")];
    let ran = router(&config, &env);
    assert!(ran.code == 0 && ran.stdout.ends_with("f.yaml: ok\n"), "{ran:?}");
    for wrong in ["engine_api_key: a${ENGINE_KEY}", "engine_api_key: ${ENGINE_KEY:-x}"] {
        let ran = router(&config.replace("engine_api_key: ${ENGINE_KEY}", wrong), &env);
        assert_eq!(ran.code, 78, "{ran:?}");
        assert!(!ran.stderr.contains(SECRET), "{ran:?}");
    }
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("log");
    let router = RouterProcess::serve(files.path(), &config, &env, &log).await;
    let admin = Client::new(router.admin);
    let shown = admin.get("/admin/config").await.text();
    assert!(shown.contains("\"ENGINE_KEY\"") && !shown.contains(SECRET), "{shown}");
    // What runs is a configuration that means the same.
    let ran = self::router(&shown, &env);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(shown.contains("\"$${x}\"") && shown.contains("\"a$$$b\""), "{shown}");
    let bad = config.replace("flow: aggregated", "flow: ${ENGINE_KEY}");
    std::fs::write(files.path().join("splitrail.yaml"), bad).unwrap();
    let reply = admin.post_with("/admin/reload", &[], "").await;
    assert!(!reply.status.is_success() && !reply.text().contains(SECRET), "{}", reply.text());
    let read = || std::fs::read_to_string(&log).unwrap();
    eventually("the refusal is logged", async || read().contains("reload refused")).await;
    router.end();
    assert!(!read().contains(SECRET), "{}", read());
}

/// The sender of a worker must not see the router's environment.
#[tokio::test]
async fn a_worker_in_a_request_is_not_filled() {
    let files = tempfile::tempdir().unwrap();
    let log = files.path().join("log");
    let env = [("INTERNAL", "s3cr3t")];
    let router = RouterProcess::serve(files.path(), CONFIG, &env, &log).await;
    let admin = Client::new(router.admin);
    let worker =
        "{\"worker\": {\"id\": \"w1\", \"role\": \"both\", \"url\": \"http://${INTERNAL}:1\"}}";
    let json = [("content-type", "application/json")];
    let reply = admin.post_with("/admin/workers", &json, worker).await;
    assert!(!reply.status.is_success() && !reply.text().contains("s3cr3t"), "{}", reply.text());
}

#[test]
fn sizes_and_durations_have_units() {
    let with = |lines: &str| format!("{CONFIG}    {lines}\n");
    for lines in [
        "queue: { max_wait: 10m, lead: 2ms500us, fairness: 10s, ttft_goal: 1500ms }",
        "auto: { tbt_goal: 200ms }",
        "queue: {}\nlimits: { body_size_max: 64MiB, request_memory_max: 2GB, body_rate_min: 4KiB/s }",
        "queue: {}\nlimits: { body_size_max: 67108864, reply_rate_min: 0 }",
        "queue: {}\nledger: { rotate: { size_max: 1GiB } }",
    ] {
        let ran = router(&with(lines), &[]);
        assert!(ran.code == 0 && ran.stdout.ends_with("f.yaml: ok\n"), "{lines}: {ran:?}");
    }
    for (lines, told) in [
        ("queue: { max_wait: 300 }", "add a unit: `300s` or `300ms`"),
        ("queue: { max_wait: 0s }", "`models[0].queue.max_wait` cannot be 0s"),
        ("queue: { lead: 2m }", "`models[0].queue.lead` cannot be 2m"),
        ("queue: {}\nlimits: { body_size_max: 64Mi }", "\"64Mi\" has an unknown unit"),
        (
            "queue: {}\nlimits: { body_size_max: 1.5 }",
            "a whole number with a unit, such as `64MiB`",
        ),
        ("queue: {}\nlimits: { body_size_max: 2GiB }", "`limits.body_size_max` cannot be 2GiB"),
        ("queue: {}\nlimits: { body_size_max: 1B }", "from 1KiB to 1GiB"),
    ] {
        let ran = router(&with(lines), &[]);
        assert_eq!(ran.code, 78, "{lines}: {ran:?}");
        assert!(ran.stderr.contains(told), "{lines}: {ran:?}");
    }
}
