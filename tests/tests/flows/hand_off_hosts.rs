//! Where hand-offs come from, and what they are called: promises 13 and 15.

use serde_json::{Value, json};
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, completion, generate, prompt, token_ids,
};
use splitrail_tests::{Spec, Trial};

/// A prefill reply whose blocks are at `host`.
fn hand_off_from(host: &str) -> String {
    let reply = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]],
            "remote_engine_id": "e", "remote_request_id": "r", "remote_host": host,
            "remote_port": 9, "remote_num_tokens": 9, "transfer_mode": "pull",
        },
    });
    Canned::reply("application/json", &reply.to_string())
}

fn spec(prefill: &Canned, model: &str) -> Spec {
    Spec {
        prefill: 0,
        decode: 1,
        policy: "{ kind: round_robin }",
        extra_workers: vec![prefill.worker("x0", "prefill")],
        model: model.into(),
        ..Spec::default()
    }
}

#[tokio::test]
async fn a_hand_off_that_names_a_host_outside_the_fleet_is_dropped() {
    for host in ["169.254.169.254", "evil.example", "10.0.0.1", "", "127.0.0.1.evil.example"] {
        let foreign = Canned::start(hand_off_from(host), Then::Close).await;
        let mut trial = Trial::start(spec(&foreign, "on_no_prefill: fail")).await;
        let reply = trial.post("no_worker", COMPLETIONS, &completion(&prompt(30, "host"))).await;
        assert_eq!(reply.status, 503, "{host}: {}", reply.text());
        assert!(reply.text().contains("hand_off_networks"), "{host}: {}", reply.text());
        assert_eq!((foreign.asked(), trial.counts(["d0"])), (1, [0]), "{host}");
        let left = [("outcome", "left")];
        let left = trial.cluster.metric("splitrail_unused_hand_offs_total", &left).await;
        assert_eq!(left, 1.0, "{host}: its blocks stay staged");
        trial.finish().await;

        // Where prefill may be done without, decode computes the prompt itself.
        let mut trial = Trial::start(spec(&foreign, "")).await;
        let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(30, "host"))).await;
        assert_eq!((reply.status.as_u16(), reply.route("local")), (200, Some("no_prefill")));
        assert!(trial.asked("d0")[0].body["kv_transfer_params"].is_null());
        trial.finish().await;
    }
}

#[tokio::test]
async fn hand_offs_that_name_members_or_allowed_networks_are_used() {
    // The simulated decode engine knows no such hand-off: that it was asked is the point.
    for (host, model) in [
        ("127.0.0.1", "on_no_prefill: fail"),
        ("localhost", "on_no_prefill: fail"),
        ("240.1.2.3", "on_no_prefill: fail\nhand_off_networks: [240.1.0.0/16]"),
    ] {
        let prefill = Canned::start(hand_off_from(host), Then::Close).await;
        let trial = Trial::start(spec(&prefill, model)).await;
        // No host answers there: the wait for one must not be the test's.
        let body = completion(&prompt(30, "host"));
        let sent = trial.cluster.http.post(COMPLETIONS, &body);
        let asked = splitrail_tests::cluster::eventually("decode is asked", async || {
            !trial.asked("d0").is_empty()
        });
        tokio::select! {
            _ = sent => {}
            () = asked => {}
        }
        let decode = &trial.asked("d0")[0];
        assert_eq!(decode.body["kv_transfer_params"]["remote_host"], host);
    }
}

#[tokio::test]
async fn no_id_of_a_client_reaches_an_engine() {
    const MINE: &str = "chosen-by-the-client";
    let mut trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let chat = json!({
        "model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": prompt(30, "p13")}],
    });
    for (path, mut body) in [
        (CHAT, chat),
        (COMPLETIONS, completion(&prompt(30, "p13"))),
        (GENERATE, generate(&token_ids(60, 13))),
    ] {
        let steering = json!({"transfer_id": MINE, "do_remote_decode": true});
        body["kv_transfer_params"] = steering.clone();
        body["request_id"] = MINE.into();
        body["rid"] = MINE.into();
        body["bootstrap_room"] = MINE.into();
        body["bootstrap_host"] = MINE.into();
        body["vllm_xargs"] = json!({"kv_transfer_params": steering});
        trial.expect("ok");
        let headers = [("x-request-id", MINE), ("content-type", "application/json")];
        let reply = trial.cluster.http.post_with(path, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("x-request-id"), MINE);
        assert!(!reply.text().contains(MINE));
    }
    for engine in ["p0", "d0"] {
        let asked = trial.asked(engine);
        assert_eq!(asked.len(), 3);
        for request in asked {
            assert!(!request.body.to_string().contains(MINE), "{}", request.body);
            assert!(request.headers.iter().all(|(_, value)| !value.contains(MINE)));
            assert_eq!(request.body["bootstrap_room"], Value::Null);
        }
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_handed_over_from_outside_the_fleet_is_named_in_the_decision() {
    let foreign = Canned::start(hand_off_from("10.0.0.1"), Then::Close).await;
    let other = Canned::start(hand_off_from("10.0.0.1"), Then::Close).await;
    let workers = vec![foreign.worker("x0", "prefill"), other.worker("x1", "prefill")];
    let mut trial = Trial::start(Spec { extra_workers: workers, ..spec(&foreign, "") }).await;
    let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(30, "host"))).await;
    assert_eq!(reply.route("local"), Some("no_prefill"));
    let told = trial.cluster.admin.get("/admin/decisions").await.json();
    let vetoed = told["decisions"][0]["vetoed"].as_array().unwrap().clone();
    let [veto] = &vetoed[..] else { panic!("{vetoed:?}") };
    assert_eq!((&veto["leg"], &veto["reason"]), (&json!("prefill"), &json!("foreign_hand_off")));
    assert!(["x0", "x1"].map(Value::from).contains(&veto["worker"]), "{veto}");
    trial.finish().await;
}
