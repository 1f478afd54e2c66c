//! A cluster of which only the engines' addresses are written down, in a file or as flags: the
//! shipped binary asks the engines for the rest.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::built;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Reply};
use tempfile::TempDir;

const LISTEN: &str = "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0 }\n";

/// A folder with a Hugging Face cache that has the simulated engines' model.
fn files() -> TempDir {
    let files = tempfile::tempdir().unwrap();
    let model = files.path().join("hub/models--sim");
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::create_dir_all(model.join("snapshots/c0ffee")).unwrap();
    std::fs::write(model.join("refs/main"), "c0ffee").unwrap();
    write_tokenizer(&model.join("snapshots/c0ffee")).unwrap();
    files
}

fn owned(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|argument| (*argument).to_owned()).collect()
}

/// An engine that does not honour thresholds, as vLLM.
async fn engine(files: &TempDir, name: &str, role: &str, more: &[&str]) -> Process {
    let arguments = ["sim-engine", "--role", role, "--honour-threshold", "false"];
    let quick = ["--prefill-us-per-token", "0", "--decode-us-per-step", "0"];
    let arguments = owned(&[&arguments, &quick[..], more].concat());
    Process::start(name, files.path(), &arguments).await
}

fn url(engine: &Process) -> String {
    format!("http://{}", engine.told("http"))
}

/// A router that finds the model's tokenizer in the cache.
async fn router(files: &TempDir, arguments: &[&str]) -> Process {
    let hub = files.path().join("hub").display().to_string();
    let arguments = owned(&[&["serve"], arguments].concat());
    let environment = [("HF_HUB_CACHE", hub.as_str())];
    Process::run(&built("splitrail"), "router", files.path(), &arguments, &environment).await
}

async fn router_of_file(files: &TempDir, models: &str) -> Process {
    let config = files.path().join("splitrail.yaml");
    std::fs::write(&config, format!("{LISTEN}{models}")).unwrap();
    router(files, &["--config", &config.display().to_string()]).await
}

async fn ready(router: &Process) -> Client {
    let http = router.client("http");
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    http
}

async fn post(http: &Client, body: &Value) -> Reply {
    let reply = http.post(COMPLETIONS, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// The figures of a reply: tokens of the prompt, and how many of them were cached.
fn tokens(reply: &Reply) -> (u64, u64) {
    let usage = &reply.json()["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    (usage["prompt_tokens"].as_u64().unwrap(), cached.unwrap_or_else(|| panic!("{usage}")))
}

/// The tokens that an engine finds of a prompt that it has computed before: full blocks, without the
/// last token.
fn full_hit(prompt_tokens: u64, block_size: u64) -> u64 {
    (prompt_tokens - 1) / block_size * block_size
}

async fn worker(router: &Process, id: &str) -> Value {
    let listed = router.client("admin").get("/admin/workers").await.json();
    let workers = listed["workers"].as_array().unwrap();
    let found = workers.iter().find(|worker| worker["id"] == id);
    found.unwrap_or_else(|| panic!("no {id} in {listed}")).clone()
}

/// Sends a prompt until the router's index has its blocks of the worker that serves it, and returns
/// the reply then: its figures come from the engine, and its overlap from the index.
async fn until_hit(http: &Client, body: &Value, block_size: u64) -> Reply {
    let mut last = None;
    eventually("the index has the prompt", async || {
        let reply = post(http, body).await;
        let overlap: u64 = reply.route("overlap_blocks").unwrap_or("0").parse().unwrap();
        let (prompt_tokens, _) = tokens(&reply);
        let hit = overlap > 0 && overlap >= full_hit(prompt_tokens, block_size) / block_size;
        last = Some(reply);
        hit
    })
    .await;
    last.unwrap()
}

async fn serves_with_hits(router: &Process) {
    let http = ready(router).await;
    let body = completion(&prompt(60, "five"));
    let first = post(&http, &body).await;
    assert_eq!(tokens(&first).1, 0, "nothing was cached");
    assert!(first.route("prefill").is_some() && first.route("decode").is_some());
    let again = until_hit(&http, &body, 16).await;
    let (prompt_tokens, cached) = tokens(&again);
    assert_eq!(cached, full_hit(prompt_tokens, 16));
    assert_eq!(again.route("cached_source"), Some("engine"));
    assert_eq!(again.route("flow"), Some("decode_first"));
}

#[tokio::test]
async fn a_file_of_five_lines_serves_with_cache_hits() {
    let files = files();
    let prefill = engine(&files, "p", "prefill", &[]).await;
    let decode = engine(&files, "d", "decode", &[]).await;
    let (p, d) = (url(&prefill), url(&decode));
    let models = format!("models:\n  - name: sim\n    prefill: [\"{p}\"]\n    decode: [\"{d}\"]\n");
    let router = router_of_file(&files, &models).await;
    serves_with_hits(&router).await;
    for (engine, role, id) in [(&prefill, "prefill", "p0"), (&decode, "decode", "d0")] {
        let worker = worker(&router, id).await;
        assert_eq!(worker["role"], role);
        assert_eq!(worker["kv_events"], engine.told("kv_events"));
        assert_eq!(worker["events_current"], true);
        assert!(worker["context_tokens"].is_u64(), "{worker}");
    }
    let config = router.client("admin").get("/admin/config").await.json();
    let model = &config["models"][0];
    assert_eq!((&model["flow"], &model["connector"]), (&json!("decode_first"), &json!("nixl")));
    assert!(model["queue"].is_object() && model["cache_loss_tracking"].is_object(), "{model}");
    let log = router.log();
    assert!(log.contains("model sim: its tokenizer is"), "{log}");
    let told = check(files.path(), &models, &["--connect"]);
    for engine in [&prefill, &decode] {
        let (events, replay) = (engine.told("kv_events"), engine.told("kv_replay"));
        let line = format!("KV events arrive ({events}), and can be replayed ({replay})");
        assert!(told.contains(&line), "{told}");
    }
    assert_eq!(told.matches("the engine shows connector nixl").count(), 2, "{told}");
    assert!(told.contains("2 workers, 0 faults"), "{told}");
}

#[tokio::test]
async fn flags_alone_serve_with_cache_hits() {
    let files = files();
    let prefill = engine(&files, "p", "prefill", &[]).await;
    let decode = engine(&files, "d", "decode", &[]).await;
    let (p, d) = (url(&prefill), url(&decode));
    let of_model = ["--model", "sim", "--prefill", &p, "--decode", &d];
    let listen = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let router = router(&files, &[&of_model[..], &listen].concat()).await;
    serves_with_hits(&router).await;
    let reload = router.client("admin").post_with("/admin/reload", &[], "").await;
    assert_ne!(reload.status, 200, "there is no file to read again");
}

#[tokio::test]
async fn an_address_keeps_its_id_in_a_reload_and_is_shown_beside_it() {
    let files = files();
    let (first, second) = (engine(&files, "a", "both", &[]), engine(&files, "b", "both", &[]));
    let (first, second) = tokio::join!(first, second);
    let models = |urls: &str| format!("models: [{{ name: sim, workers: [{urls}] }}]\n");
    let both = format!("\"{}\", \"{}\"", url(&first), url(&second));
    let router = router_of_file(&files, &models(&both)).await;
    ready(&router).await;
    let only = models(&format!("\"{}\"", url(&second)));
    std::fs::write(files.path().join("splitrail.yaml"), format!("{LISTEN}{only}")).unwrap();
    let reload = router.client("admin").post_with("/admin/reload", &[], "").await;
    assert_eq!(reload.status, 200, "{}", reload.text());
    assert_eq!(worker(&router, "w1").await["url"], url(&second));
    let mut workers = Command::new(built("splitrail"));
    let workers = workers.args(["workers", "--admin", router.told("admin")]).output().unwrap();
    let workers = String::from_utf8(workers.stdout).unwrap();
    let row: Vec<_> = workers.lines().nth(1).unwrap().split_whitespace().take(3).collect();
    assert_eq!(row, ["sim", "w1", second.told("http")], "{workers}");
}

#[tokio::test]
async fn an_engine_that_starts_after_the_router_is_asked_then() {
    let files = files();
    let mut early = engine(&files, "w", "both", &[]).await;
    let port = early.told("http").rsplit(':').next().unwrap().to_owned();
    let url = url(&early);
    early.kill();
    let router =
        router_of_file(&files, &format!("models: [{{ name: sim, workers: [\"{url}\"] }}]\n")).await;
    let http = router.client("http");
    assert_eq!(http.get("/ready").await.status, 503);
    let late = engine(&files, "w", "both", &["--http-port", &port]).await;
    let http = ready(&router).await;
    let reply = until_hit(&http, &completion(&prompt(60, "late")), 16).await;
    let (prompt_tokens, cached) = tokens(&reply);
    assert_eq!(cached, full_hit(prompt_tokens, 16));
    let worker = worker(&router, "w0").await;
    assert_eq!(worker["kv_events"], late.told("kv_events"));
}

#[tokio::test]
async fn an_engine_that_restarts_is_asked_again() {
    let files = files();
    let mut first = engine(&files, "w", "both", &[]).await;
    let port = first.told("http").rsplit(':').next().unwrap().to_owned();
    let models = format!("models: [{{ name: sim, workers: [\"{}\"] }}]\n", url(&first));
    let router = router_of_file(&files, &models).await;
    let http = ready(&router).await;
    let body = completion(&prompt(60, "again"));
    until_hit(&http, &body, 16).await;
    let events = first.told("kv_events").to_owned();
    first.kill();
    // Another block size, and other ports of KV events.
    let second = engine(&files, "w", "both", &["--http-port", &port, "--block-size", "32"]).await;
    assert_ne!(second.told("kv_events"), events);
    eventually("the router follows the new process", async || {
        let worker = worker(&router, "w0").await;
        worker["kv_events"] == second.told("kv_events") && worker["events_current"] == true
    })
    .await;
    let reply = until_hit(&http, &body, 32).await;
    let (prompt_tokens, cached) = tokens(&reply);
    assert_eq!(cached, full_hit(prompt_tokens, 32));
    let log = router.log();
    assert!(!log.contains("differs from the model's"), "{log}");
    let changed =
        log.lines().find(|line| line.contains("most engines have another block size now"));
    assert!(changed.is_some_and(|line| line.contains("model=\"sim\"")), "{log}");
}

/// Standard output and error of `check`, with further arguments.
fn check(files: &Path, models: &str, more: &[&str]) -> String {
    let config = files.join("checked.yaml");
    std::fs::write(&config, format!("{LISTEN}{models}")).unwrap();
    let mut command = Command::new(built("splitrail"));
    command.arg("check").arg(&config).args(more).env("HF_HUB_CACHE", files.join("hub"));
    let output = command.stdin(Stdio::null()).output().unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

#[test]
fn check_tells_what_follows_and_what_is_off() {
    let files = files();
    let pair = "    prefill: [\"http://10.0.0.1:8000\"]\n    decode: [\"http://10.0.1.1:8000\"]\n";
    let told = check(files.path(), &format!("models:\n  - name: sim\n{pair}"), &[]);
    assert!(told.contains("note: model sim: its tokenizer is "), "{told}");
    assert!(told.contains("flow decode_first and connector nixl"), "{told}");
    let told = check(files.path(), &format!("models:\n  - name: org/other\n{pair}"), &[]);
    let note = "note: model org/other: its engines are asked for the tokens of each prompt";
    assert!(told.contains(note) && told.contains("`hf download org/other "), "{told}");
    assert!(told.contains("flow decode_first"), "{told}");
}

#[tokio::test]
async fn a_model_without_a_tokenizer_is_served_with_cache_hits() {
    let files = files();
    let engine = engine(&files, "w", "both", &["--model", "other"]).await;
    let models = format!("models: [{{ name: other, workers: [\"{}\"] }}]\n", url(&engine));
    let router = router_of_file(&files, &models).await;
    let http = ready(&router).await;
    let mut body = completion(&prompt(60, "asked"));
    body["model"] = json!("other");
    let (prompt_tokens, cached) = tokens(&until_hit(&http, &body, 16).await);
    assert_eq!(cached, full_hit(prompt_tokens, 16));
    assert!(router.log().contains("model other: its engines are asked"), "{}", router.log());
}
