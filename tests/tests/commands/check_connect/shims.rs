//! Workers behind shims: what the shim tells.

use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::process::Process;

use super::support::{checked, config, worker};

/// A shim of the worker `w0` that reports to a router that is not there.
async fn shim(engine: &SimEngine, folder: &std::path::Path) -> Process {
    let args = [
        "--engine",
        &engine.url(),
        "--listen",
        "127.0.0.1:0",
        "--router",
        "127.0.0.1:1",
        "--role",
        "both",
        "--id",
        "w0",
    ];
    Process::shim("w0", folder, &args.map(str::to_owned)).await
}

const KEYS: &str = "block_size: 16\nflow: aggregated\nconnector: none";

/// The worker of a shim, as the configuration lists it.
fn behind(shim: &Process, id: &str) -> String {
    format!("{{ id: {id}, role: both, url: \"http://{}\", shim: true }}", shim.told("http"))
}

#[tokio::test]
async fn a_shim_tells_about_its_mirror_and_its_routers() {
    let files = tempfile::tempdir().unwrap();
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let shim = shim(&engine, files.path()).await;
    let result = checked(&config(KEYS, &[behind(&shim, "w0")])).await;
    let kinds = result.kinds();
    assert!(kinds.contains(&(Some("w0"), "shim_detached")), "{:#}", result.json);
    assert!(result.words("shim_detached").contains("0 of 1 routers"));
    assert!(kinds.iter().all(|(_, kind)| !kind.starts_with("kv_")), "{kinds:?}");
    assert_eq!(result.facts("w0")["text_tokens_agree"], true, "the engine behind it is asked");

    let result = checked(&config(KEYS, &[behind(&shim, "w9")])).await;
    assert!(result.words("shim_mismatch").contains("`w0`"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn an_engine_is_no_shim() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let direct = worker("w0", "both", &engine).replace(" }", ", shim: true }");
    let result = checked(&config(KEYS, &[direct])).await;
    assert!(result.words("not_a_shim").contains("shim: true"));
    assert_eq!(result.code, Some(69));
}
