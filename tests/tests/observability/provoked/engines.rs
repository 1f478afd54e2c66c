//! Alerts about engines that fail, or reply what they must not.

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, KvConnector, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{Asked, RawEngine, Turn, reply};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::unanswering::Unanswering;

use super::Watched;
use super::watch::Watch;

#[tokio::test]
async fn retries_beyond_their_budget_fire_retries_refused() {
    let model = "breaker: { failures: 0 }\nretries: { prefill: 1, decode: 0, budget_percent: 0 }\n\
                 on_no_prefill: fail";
    let spec = Spec { decode: 1, model: model.into(), ..Spec::default() };
    let watched = Watched::start(spec).await;
    watched.is_healthy().await;
    for engine in ["p0", "p1"] {
        let kind = FaultKind::Status { status: 500 };
        watched.cluster.engine(engine).set_fault(Fault { kind, times: None });
    }
    let mut number = 0;
    // A hundred retries are in reserve.
    eventually("a retry is refused", async || {
        number += 1;
        let body = completion(&prompt(3, &format!("{number}-")));
        assert_eq!(watched.cluster.http.post(COMPLETIONS, &body).await.status, 503);
        watched.cluster.metric("splitrail_retries_refused_total", &[]).await > 0.0
    })
    .await;
    let refused = [
        "SplitrailRetriesRefused",
        "SplitrailErrorBudgetBurnsFast",
        "SplitrailErrorBudgetBurnsSlowly",
    ];
    watched.fires(&refused).await;
}

#[tokio::test]
async fn a_revision_that_is_slower_fires_transfer_group_slow() {
    let spec = Spec {
        policy: "{ kind: round_robin }",
        worker: |name| match name.ends_with('1') {
            true => ", transfer_group: new",
            false => ", transfer_group: old",
        },
        engine: |name, config: &mut SimConfig| {
            config.prefill_us_per_token = if name == "p1" { 20_000 } else { 200 };
        },
        ..Spec::default()
    };
    let watched = Watched::start(spec).await;
    watched.is_healthy().await;
    let http = watched.cluster.http.clone();
    let mut traffic = tokio::task::JoinSet::new();
    traffic.spawn(async move {
        for number in 0u64.. {
            let body = completion(&prompt(20, &format!("{number}-")));
            assert_eq!(http.post(COMPLETIONS, &body).await.status, 200);
        }
    });
    watched.fires(&["SplitrailTransferGroupSlow", "SplitrailWorkerSlow"]).await;
    traffic.shutdown().await;
}

/// The reply to a prompt of token ids, under this id.
fn generated(asked: &Asked, id: &str) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let tokens = body["prompt"].as_array().map_or(0, Vec::len);
    let answer = json!({
        "id": id, "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    });
    Turn::answer(reply(200, "application/json", &answer.to_string()))
}

#[tokio::test]
async fn replies_to_the_requests_of_others_fire_foreign_replies() {
    // Once a connection has served a request, it gets the reply to another one.
    let engine = RawEngine::start(|asked| match asked.before {
        0 => generated(asked, &format!("cmpl-{}", asked.heard.header("x-request-id"))),
        _ => generated(asked, "cmpl-0"),
    })
    .await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    let watch = Watch::of(&[front.router.admin]).await;
    watch.is_healthy().await;
    let body = json!({"model": "sim", "prompt": [5, 6, 7], "max_tokens": 1});
    eventually("a reply is foreign", async || {
        assert_eq!(front.http.post(COMPLETIONS, &body).await.status, 200);
        front.metric("splitrail_foreign_replies_total", &[]).await > 0.0
    })
    .await;
    watch.fires(&["SplitrailForeignReplies"]).await;
}

#[tokio::test]
async fn kv_that_was_read_for_other_tokens_fires_kv_of_other_tokens() {
    // Reading takes nearly no time.
    let model = "read_back: true\ncosts: { hand_off_base_ms: 0, kv_bytes_per_token: 1 }";
    let engine = |_: &str, config: &mut SimConfig| config.bidirectional_ttl_ms = Some(480_000);
    let spec = Spec { decode: 1, model: model.into(), engine, ..Spec::default() };
    let watched = Watched::start(spec).await;
    watched.is_healthy().await;
    for engine in ["p0", "p1"] {
        let kind = FaultKind::OtherPromptIds;
        watched.cluster.engine(engine).set_fault(Fault { kind, times: None });
    }
    let mut prompt: Vec<u64> = (0..100).map(|place| 3 + (place * 11 + place / 7) % 250).collect();
    for _ in 0..2 {
        let body = json!({
            "model": "sim", "max_tokens": 90, "temperature": 0, "prompt": prompt,
            "return_token_ids": true,
        });
        let reply = watched.cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        // The next turn has the reply, and a question.
        let reply = reply.json();
        let answer = reply["choices"][0]["token_ids"].as_array().unwrap();
        prompt.extend(answer.iter().map(|id| id.as_u64().unwrap()));
        prompt.extend(10..30);
    }
    watched.fires(&["SplitrailKvOfOtherTokens"]).await;
}

#[tokio::test]
async fn a_prefill_engine_that_dies_before_it_has_pushed_fires_decode_legs_stranded() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        connector: KvConnector::NixlPush,
        model: "timeouts: { prefill: 2s }\nlease: 2s".into(),
        engine: |name, config| {
            if name == "p0" {
                config.prefill_us_per_token = 2_000;
            }
        },
        ..Spec::default()
    };
    let mut watched = Watched::start(spec).await;
    watched.is_healthy().await;
    let http = splitrail_tests::Client::new(watched.cluster.running.addresses.http);
    let body = completion(&prompt(60, "stranded"));
    let asking = http.post(COMPLETIONS, &body);
    let killing = async {
        eventually("a decode leg waits for its KV", async || {
            watched.cluster.engine("p0").state().registered == 1
        })
        .await;
        let place = watched.cluster.engines.iter().position(|(name, _)| name == "p0").unwrap();
        watched.cluster.engines.remove(place).1.shutdown().await;
    };
    let (reply, ()) = tokio::join!(asking, killing);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let stranded =
        ["SplitrailDecodeLegsStranded", "SplitrailWorkerDown", "SplitrailNoPrefillWorker"];
    watched.fires(&stranded).await;
}

#[tokio::test]
async fn blocks_that_no_decode_worker_can_fetch_fire_hand_offs_unused() {
    // Connections to one decode worker take for ever, and the other one is refused what it pulls.
    let nobody = Unanswering::start().await;
    let spec = Spec {
        prefill: 1,
        decode: 1,
        policy: "{ kind: round_robin }",
        model: "timeouts: { connect: 30s }\nhealth: { probe_timeout: 10m }".into(),
        extra_workers: vec![nobody.worker("x0", "decode")],
        ..Spec::default()
    };
    let watched = Watched::start(spec).await;
    watched.is_healthy().await;
    watched.cluster.engine("p0").set_fault(Fault { kind: FaultKind::RefusePulls, times: None });
    let failed = [("outcome", "failed")];
    let mut turn = 0;
    eventually("a hand-off is left", async || {
        turn += 1;
        let body = completion(&prompt(40, &format!("left{turn}-"))).to_string();
        let leaving = watched.cluster.http.post_with(COMPLETIONS, &[], body);
        let staged = eventually("prefill has staged its blocks", async || {
            watched.cluster.engine("p0").state().staged_hand_offs > 0
        });
        tokio::select! {
            _ = leaving => {}
            () = staged => {}
        }
        watched.cluster.metric("splitrail_unused_hand_offs_total", &failed).await > 0.0
    })
    .await;
    watched.fires(&["SplitrailHandOffsUnused"]).await;
}
