//! Who may attach.

use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::shim::{Shim, hello, run};
use splitrail_tests::solo::whole_reply;
use splitrail_tests::{Cluster, Spec};
use tonic::Code;
use tonic::transport::Endpoint;

use super::support::{attach, fleet_address, held, is_believed, router, served, worker};

const URL: &str = "http://127.0.0.1:9";

#[tokio::test]
async fn one_shim_cannot_attach_the_worker_of_another() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("m", 1, vec![run(None, 1..=3)]).await;
    shim.acked(1).await;
    let thief = v1::Hello {
        instance_id: "thief".into(),
        instance_secret: b"the secret of another process".to_vec(),
        ..hello("s0", "http://127.0.0.1:8")
    };
    let refused =
        Shim::attach(fleet_address(&router), thief.clone()).await.err().expect("it is refused");
    assert_eq!(refused.code(), Code::AlreadyExists);
    // Nor by another name for the same address.
    let other = v1::Hello { worker_id: "a0".into(), url: URL.into(), ..thief.clone() };
    let refused = Shim::attach(fleet_address(&router), other).await.err().expect("it is refused");
    assert_eq!(refused.code(), Code::AlreadyExists);
    shim.stored(2, [4]).await;
    shim.acked(2).await;
    assert_eq!(held(&router, "s0"), [1, 2, 3, 4]);
    assert!(worker(&router, "a0").is_none());
}

#[tokio::test]
async fn a_newer_stream_of_the_same_shim_takes_over() {
    let router = router("").await;
    let mut older = attach(&router, hello("s0", URL)).await;
    older.snapshot("s0-mirror", 3, vec![run(None, 1..=3)]).await;
    older.acked(3).await;
    let newer = attach(&router, hello("s0", URL)).await;
    assert_eq!(older.ended().await, Code::Aborted);
    assert_eq!(newer.welcome.known_sequence, Some(3));
    // The same address with a new process: the shim was started again.
    let again = v1::Hello {
        instance_id: "second".into(),
        instance_secret: b"the secret of the second process".to_vec(),
        mirror_id: "second".into(),
        ..hello("s0", URL)
    };
    let refused =
        Shim::attach(fleet_address(&router), again.clone()).await.err().expect("it is refused");
    assert_eq!(refused.code(), Code::AlreadyExists, "the stream before is open");
    drop(newer);
    let mut third = None;
    eventually("it attaches once that stream has ended", async || {
        third = Shim::attach(fleet_address(&router), again.clone()).await.ok();
        third.is_some()
    })
    .await;
    let mut third = third.expect("it is attached");
    assert_eq!(third.welcome.known_sequence, None);
    third.snapshot("second", 1, vec![run(None, 7..=8)]).await;
    third.acked(1).await;
    assert_eq!(held(&router, "s0"), [7, 8]);
}

#[tokio::test]
async fn invalid_or_unserved_attachments_are_refused() {
    let router = router("").await;
    let refused = async |hello: v1::Hello| {
        let attached = Shim::attach(fleet_address(&router), hello).await;
        attached.err().expect("it is refused").code()
    };
    let good = hello("s0", URL);
    for (bad, code) in [
        (v1::Hello { model: "other".into(), ..good.clone() }, Code::NotFound),
        (v1::Hello { protocol: 2, ..good.clone() }, Code::FailedPrecondition),
        (v1::Hello { worker_id: "a b".into(), ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { worker_id: String::new(), ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { instance_id: String::new(), ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { instance_secret: Vec::new(), ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { instance_secret: vec![7; 15], ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { instance_secret: vec![7; 65], ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { role: 0, ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { url: "ftp://127.0.0.1:9".into(), ..good.clone() }, Code::InvalidArgument),
        (v1::Hello { url: "http://127.0.0.1:9/x".into(), ..good.clone() }, Code::InvalidArgument),
    ] {
        assert_eq!(refused(bad.clone()).await, code, "{bad:?}");
    }
    let capabilities = v1::Capabilities { block_size: Some(3), ..v1::Capabilities::default() };
    let other = v1::Hello { capabilities: Some(capabilities), ..good.clone() };
    assert_eq!(refused(other).await, Code::FailedPrecondition);
    eventually("nobody is left behind", async || worker(&router, "s0").is_none()).await;
    let alias = v1::Hello { model: "default".into(), ..good };
    assert_eq!(attach(&router, alias).await.welcome.model, "sim");
}

#[tokio::test]
async fn workers_outside_the_allowed_networks_cannot_attach() {
    let router = router("fleet: { networks: [127.0.0.0/8, 0.0.0.0/0] }").await;
    for url in ["http://169.254.169.254:80", "http://[fe80::1]:80", "http://0.0.0.0:80"] {
        let refused = Shim::attach(fleet_address(&router), hello("s0", url)).await;
        assert_eq!(refused.err().expect("it is refused").code(), Code::PermissionDenied, "{url}");
    }
    let capabilities = v1::Capabilities {
        bootstrap: "http://169.254.169.254:80".into(),
        ..v1::Capabilities::default()
    };
    let beside = v1::Hello { capabilities: Some(capabilities), ..hello("s0", URL) };
    let refused = Shim::attach(fleet_address(&router), beside).await;
    assert_eq!(refused.err().expect("it is refused").code(), Code::PermissionDenied);
    assert!(worker(&router, "s0").is_none());
    attach(&router, hello("s0", "http://localhost:9")).await;
}

#[tokio::test]
async fn only_who_has_a_token_may_attach() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tokens");
    std::fs::write(&path, "first\nsecond\n").expect("a file");
    let router = router(&format!("fleet: {{ token: {{ kind: file, path: {path:?} }} }}")).await;
    let endpoint =
        Endpoint::from_shared(format!("http://{}", fleet_address(&router))).expect("an address");
    let attach = async |token: Option<&str>| {
        let attached = Shim::attach_over(endpoint.connect_lazy(), token, hello("s0", URL)).await;
        attached.map(|shim| shim.welcome.model).map_err(|status| status.code())
    };
    for token in [None, Some(""), Some("firs"), Some("third")] {
        assert_eq!(attach(token).await, Err(Code::Unauthenticated), "{token:?}");
    }
    for token in ["first", "second"] {
        assert_eq!(attach(Some(token)).await.as_deref(), Ok("sim"));
    }
}

/// A router whose only engines that say a block size are those of shims.
async fn without_block_size() -> Cluster {
    let nobody = format!("{{ id: x0, role: both, url: \"{URL}\" }}");
    let model = "discovery: [{ kind: shim }]".to_owned();
    let extra_workers = vec![nobody];
    let spec =
        Spec { fleet: true, model, block_size: "auto", extra_workers, ..Spec::aggregated(0) };
    Cluster::start(spec).await
}

/// The hello of a shim whose engine has blocks of so many tokens.
fn says(id: &str, url: &str, tokens: u32) -> v1::Hello {
    let block_size = Some(tokens);
    let capabilities = Some(v1::Capabilities { block_size, ..v1::Capabilities::default() });
    v1::Hello { capabilities, ..hello(id, url) }
}

#[tokio::test]
async fn engines_that_were_down_still_count_when_a_shim_reports_another_block_size() {
    let router = without_block_size().await;
    let known = [("s0", "http://127.0.0.1:10"), ("s1", "http://127.0.0.1:11")];
    let mut shims = Vec::new();
    for (id, url) in known {
        let shim = attach(&router, says(id, url, 16)).await;
        let is_up = |up: bool| worker(&router, id).is_some_and(|worker| worker.is_up() == up);
        shim.say(Message::Load(v1::Load { up: false, ..v1::Load::default() })).await;
        eventually("it is down", async || is_up(false)).await;
        shim.load(0, 0).await;
        eventually("it is up", async || is_up(true)).await;
        shims.push(shim);
    }
    let odd = attach(&router, says("odd", "http://127.0.0.1:12", 17)).await;
    assert_eq!(odd.welcome.block_size, 17, "it hashes as its engine does");
    assert_eq!(served(&router).pool.block_size(), 16, "most engines have 16");
}

#[tokio::test]
async fn the_first_shim_does_not_keep_others_out_by_its_block_size() {
    let router = without_block_size().await;
    let engine = ScriptedServer::start(|heard| match heard.is_inference() {
        true => whole_reply(),
        false => ScriptedReply::json(200, "{}"),
    })
    .await;
    let odd = attach(&router, says("odd", "http://127.0.0.1:10", 17)).await;
    odd.load(0, 0).await;
    let honest = says("s0", &engine.url(), 16);
    let mut shim = attach(&router, honest.clone()).await;
    assert_eq!(shim.welcome.block_size, 16, "it hashes as its engine does");
    shim.snapshot("s0-mirror", 1, vec![run(None, 1..=2)]).await;
    shim.stored(2, [3]).await;
    shim.load(0, 0).await;
    let body = r#"{"model":"sim","prompt":"p","max_tokens":1}"#;
    let json = [("content-type", "application/json")];
    eventually("a request goes to the second worker", async || {
        router.http.post_with("/v1/completions", &json, body).await;
        engine.heard().iter().any(|heard| heard.is_inference())
    })
    .await;
    assert!(held(&router, "s0").is_empty() && !is_believed(&router, "s0"));
    // Most engines have 16.
    attach(&router, says("s1", "http://127.0.0.1:11", 16)).await;
    assert_eq!(shim.ended().await, Code::Unavailable);
    let mut shim = attach(&router, honest).await;
    shim.snapshot("s0-mirror", 2, vec![run(None, 1..=3)]).await;
    shim.acked(2).await;
    assert_eq!(held(&router, "s0"), [1, 2, 3]);
    assert!(is_believed(&router, "s0"));
}
