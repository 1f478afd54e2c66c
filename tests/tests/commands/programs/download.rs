//! `--download`: the tokenizer of a model comes from the hub, and a failure is reported at the
//! place where the model is named.

use std::path::Path;

use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::built;
use splitrail_tests::process::Process;
use splitrail_tests::tls::fixture;
use splitrail_tests::tls_server::{ServerCertificate, TlsServer};
use tempfile::TempDir;

use super::support::{Ran, Run};

mod hub;

use hub::{COMMIT, Fault, Hub, TOKEN, git_name};

const ID: &str = "org/model";
const STORE: &str = "home/hub/models--org--model";

/// A folder with a configuration and the model that a hub has.
fn files(tokenizer: &str) -> TempDir {
    let files = tempfile::tempdir().unwrap();
    std::fs::create_dir(files.path().join("model")).unwrap();
    write_tokenizer(&files.path().join("model")).unwrap();
    let config = format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}\nmodels:\n  - name: sim\n    \
         tokenizer: {tokenizer}\n    workers: ['http://127.0.0.1:1']\n"
    );
    std::fs::write(files.path().join("splitrail.yaml"), config).unwrap();
    files
}

/// Runs `splitrail check`, with variables of the environment beside those of the cache and the hub.
async fn check(files: &Path, endpoint: &str, more: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let home = files.join("home").display().to_string();
    let of_test = [("HF_HOME", &*home), ("HF_ENDPOINT", endpoint), ("HF_TOKEN", "")];
    let env = [&of_test[..], more].concat();
    let arguments = [&["check", "splitrail.yaml"][..], arguments].concat();
    tokio::task::block_in_place(|| {
        Run { folder: files, env: &env, ..Run::default() }.with(&arguments)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tokenizer_comes_into_the_cache_and_is_used_from_there() {
    let files = files(ID);
    let hub = Hub::start(ID, &files.path().join("model"), Fault::None).await;
    let without = check(files.path(), &hub.url(), &[], &[]).await;
    assert_eq!(without.code, 78, "{without:?}");
    assert!(without.stderr.contains("splitrail.yaml:4:16:"), "{without:?}");
    assert!(without.stderr.contains("--download"), "{without:?}");
    assert!(hub.asked().is_empty(), "nothing is fetched without the flag");

    let ran = check(files.path(), &hub.url(), &[("HF_TOKEN", TOKEN)], &["--download"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stderr.contains("tokenizer downloaded"), "{ran:?}");
    assert!(!format!("{ran:?}").contains(TOKEN), "{ran:?}");
    // The layout is that of the hub's own library.
    let store = files.path().join(STORE);
    assert_eq!(std::fs::read_to_string(store.join("refs/main")).unwrap(), COMMIT);
    let snapshot = store.join("snapshots").join(COMMIT);
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        let content = std::fs::read(files.path().join("model").join(name)).unwrap();
        assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), content, "{name}");
        let target = std::fs::read_link(snapshot.join(name)).unwrap();
        assert!(target.starts_with("../../blobs"), "{}", target.display());
        if name != "tokenizer.json" {
            assert_eq!(target.file_name().unwrap().to_str(), Some(&*git_name(&content)));
        }
    }
    assert_eq!(std::fs::read_dir(&snapshot).unwrap().count(), 3, "no weights");
    // The credential is for the hub alone.
    for (path, credential) in hub.asked() {
        let expected = (path != "/tokenizer.json").then(|| format!("Bearer {TOKEN}"));
        assert_eq!(credential, expected, "{path}");
    }
    drop(hub);
    for arguments in [&[][..], &["--download"]] {
        let ran = check(files.path(), "http://127.0.0.1:9", &[], arguments).await;
        assert_eq!(ran.code, 0, "the cache has it: {ran:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_without_a_file_fetches_the_tokenizer_of_its_model() {
    let files = files("none");
    let hub = Hub::start(ID, &files.path().join("model"), Fault::None).await;
    let front = TlsServer::start(hub.address, ServerCertificate::VALID).await;
    let (home, ca) = (files.path().join("home"), fixture("engines/ca.pem"));
    let (home, ca, url) = (home.display().to_string(), ca.display().to_string(), front.url());
    let env = [("HF_HOME", &*home), ("HF_ENDPOINT", &*url), ("SSL_CERT_FILE", &*ca)];
    let arguments = ["serve", "--model", ID, "--worker", "http://127.0.0.1:1", "--download"];
    let listeners = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let arguments: Vec<String> =
        [&arguments[..], &listeners[..]].concat().into_iter().map(str::to_owned).collect();
    // The storage has no TLS, to which no redirect leads from https.
    let run = Run { folder: files.path(), env: &env, ..Run::default() };
    let strings: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ran = tokio::task::block_in_place(|| run.with(&strings));
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(
        ran.stderr.contains("command line: `--model` \"org/model\" cannot be downloaded"),
        "{ran:?}"
    );
    assert!(ran.stderr.contains("redirects to no place that is followed"), "{ran:?}");
    assert!(front.secured() > 0, "it was asked over TLS");
    let env = [("HF_HOME", &*home), ("HF_ENDPOINT", &*hub.url())];
    let router = Process::run(&built("splitrail"), "router", files.path(), &arguments, &env).await;
    let config = router.client("admin").get("/admin/config").await.json();
    assert_eq!(config["models"][0]["tokenizer"]["kind"], "huggingface", "{config}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_download_is_reported_at_its_place_and_leaves_no_file() {
    for (fault, token, code, told) in [
        (Fault::Gated, "", 77, "the model is gated, and HF_TOKEN is not set"),
        (Fault::Gated, "hf_other", 77, "the account of HF_TOKEN has no access"),
        (Fault::NoTokenizer, "", 78, "the model has no tokenizer.json on the hub"),
        (Fault::Corrupted, "", 69, "tokenizer.json is not what the hub has announced"),
        (Fault::Missing, "", 69, "status 404"),
        (Fault::Circle, "", 69, "redirects more than 5 times"),
    ] {
        let files = files(ID);
        let hub = Hub::start(ID, &files.path().join("model"), fault).await;
        let ran = check(files.path(), &hub.url(), &[("HF_TOKEN", token)], &["--download"]).await;
        assert_eq!(ran.code, code, "{fault:?}: {ran:?}");
        let place =
            "splitrail.yaml:4:16: `models[0].tokenizer` \"org/model\" cannot be downloaded: ";
        assert!(ran.stderr.contains(place) && ran.stderr.contains(told), "{fault:?}: {ran:?}");
        assert!(ran.stderr.contains("hint: "), "{ran:?}");
        let snapshot = files.path().join(STORE).join("snapshots").join(COMMIT);
        assert!(!snapshot.join("tokenizer.json").exists(), "{fault:?}");
        assert!(!files.path().join(STORE).join("refs/main").exists(), "{fault:?}");
    }
    let files = files("org/other");
    let hub = Hub::start(ID, &files.path().join("model"), Fault::None).await;
    let ran = check(files.path(), &hub.url(), &[], &["--download", "--json"]).await;
    assert_eq!(ran.code, 77, "{ran:?}");
    let told: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(
        (&told["exit_code"], &told["problems"][0]["line"]),
        (&77.into(), &4.into()),
        "{told}"
    );
    assert!(ran.stdout.contains("the hub has no such public model"), "{ran:?}");
    let url = hub.url();
    drop(hub);
    let ran = check(files.path(), &url, &[], &["--download"]).await;
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.stderr.contains("nothing listens at"), "{ran:?}");
    let ran = check(files.path(), &url, &[("HF_HUB_OFFLINE", "1")], &["--download"]).await;
    assert_eq!(ran.code, 78, "{ran:?}");
    assert!(ran.stderr.contains("HF_HUB_OFFLINE forbids it"), "{ran:?}");
}
