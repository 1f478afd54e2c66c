//! Hand-offs are used once, in time, or given back.

use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Reference, Trial, completion, prompt, streamed};
use splitrail_tests::unanswering::Unanswering;
use splitrail_tests::{Client, Spec};

/// Workers take turns, so that the first decode leg is `d0`'s.
fn in_turn(decode: usize, model: &str) -> Spec {
    let policy = "{ kind: round_robin }";
    Spec { prefill: 1, decode, policy, model: model.into(), ..Spec::default() }
}

async fn expired(trial: &Trial) -> f64 {
    let labels = [("leg", "decode"), ("reason", "lease_expired")];
    trial.cluster.metric("splitrail_retries_total", &labels).await
}

const FOR_EVER: FaultKind = FaultKind::SlowFirstByte { delay_ms: 3_600_000 };

#[tokio::test]
async fn a_stream_that_has_not_begun_within_the_lease_gets_a_new_prefill() {
    let reference = Reference::start().await;
    for decode in [1, 2] {
        let mut trial = Trial::start(in_turn(decode, "lease: 3s")).await;
        trial.fault("d0", FOR_EVER, Some(1));
        let body = completion(&prompt(30, "late"));
        let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
        assert_eq!(streamed_text(&chunks, 0), reference.text(COMPLETIONS, &body).await);
        assert_eq!(trial.counts(["p0"]), [2], "with {decode} decode workers");
        assert_eq!(expired(&trial).await, 1.0);
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_lease_that_ends_every_time_is_an_error_that_says_so() {
    let mut trial = Trial::start(in_turn(1, "lease: 500ms\nretries: { decode: 1 }")).await;
    trial.fault("d0", FOR_EVER, None);
    let body = streamed(&completion(&prompt(30, "late")));
    let reply = trial.post("lease_expired", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 504, "{}", reply.text());
    assert!(reply.text().contains("d0 has not taken a hand-off within its lease"));
    assert_eq!(trial.counts(["p0"]), [2]);
    trial.finish().await;
}

/// One request at a time, which never ends.
fn stuck(name: &str, config: &mut SimConfig) {
    if name == "d0" {
        config.max_num_seqs = 1;
        config.decode_us_per_step = 3_600_000_000;
    }
}

#[tokio::test]
async fn a_whole_answer_that_waits_in_a_queue_past_the_lease_gets_a_new_prefill() {
    let model = "lease: 4s\nrequest_flows: [aggregated]";
    let mut trial = Trial::start(Spec { engine: stuck, ..in_turn(2, model) }).await;
    let reference = Reference::start().await;
    let http = Client::new(trial.cluster.running.addresses.http);
    let first = streamed(&completion(&prompt(3, "first"))).to_string();
    let headers = [("x-splitrail-flow", "aggregated")];
    trial.expect("cancelled");
    let occupying = async {
        http.post_with(COMPLETIONS, &headers, first).await;
        panic!("it never ends");
    };
    let asking = async {
        trial.until_running("d0").await;
        let body = completion(&prompt(30, "queued"));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
        assert_eq!(reply.route("decode"), Some("d1"));
        assert_eq!(trial.counts(["p0"]), [2]);
        assert_eq!(expired(&trial).await, 1.0);
    };
    tokio::select! {
        () = occupying => {}
        () = asking => {}
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_no_engine_received_serves_the_next_decode_worker() {
    let mut trial = Trial::start(in_turn(2, "")).await;
    let reference = Reference::start().await;
    let place = trial.cluster.engines.iter().position(|(name, _)| name == "d0").unwrap();
    trial.cluster.engines.remove(place).1.shutdown().await;
    for stream in [false, true] {
        let before = trial.counts(["p0"])[0];
        let body = completion(&prompt(30, &format!("again{stream}")));
        let expected = reference.text(COMPLETIONS, &body).await;
        let text = if stream {
            let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
            streamed_text(&chunks, 0)
        } else {
            whole_text(&trial.post("ok", COMPLETIONS, &body).await.json(), 0)
        };
        assert_eq!(text, expected);
        assert_eq!(trial.counts(["p0"])[0] - before, 1, "no second prefill");
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_whose_lease_has_ended_serves_no_other_decode_worker() {
    let reference = Reference::start().await;
    let nobody = Unanswering::start().await;
    // The first decode worker receives nothing for the whole lease, so the hand-off is unused. With
    // that hand-off, the last attempt would fail as well.
    let model = "lease: 3s\ntimeouts: { connect: 30s }\nretries: { decode: 1 }";
    let spec = Spec { extra_workers: vec![nobody.worker("x0", "decode")], ..in_turn(1, model) };
    let mut trial = Trial::start(spec).await;
    let body = completion(&prompt(30, "ended"));
    let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    assert_eq!(streamed_text(&chunks, 0), reference.text(COMPLETIONS, &body).await);
    assert_eq!(trial.counts(["p0", "d0"]), [2, 1]);
    assert_eq!(expired(&trial).await, 1.0);
    trial.nothing_is_held().await;
}

#[tokio::test]
async fn blocks_staged_for_a_client_that_left_are_fetched_and_freed() {
    let nobody = Unanswering::start().await;
    let spec = Spec {
        extra_workers: vec![nobody.worker("x0", "decode")],
        ..in_turn(1, "timeouts: { connect: 30s }")
    };
    let mut trial = Trial::start(spec).await;
    trial.expect("cancelled");
    let body = completion(&prompt(40, "gone")).to_string();
    let leaving = trial.cluster.http.post_with(COMPLETIONS, &[], body);
    let staged = eventually("prefill has staged its blocks", async || {
        trial.cluster.engine("p0").state().staged_hand_offs == 1
    });
    tokio::select! {
        reply = leaving => panic!("{reply:?}"),
        () = staged => {}
    }
    // The lease of 30 s would free them as well, but not within this test's patience.
    trial.staged_blocks_are_freed().await;
    let totals = trial.cluster.engine("p0").state().totals;
    assert_eq!((totals.hand_offs_pulled, totals.hand_offs_expired), (1, 0));
    let fetched = trial.asked("d0");
    assert_eq!(fetched.len(), 1);
    assert_eq!(fetched[0].body["max_tokens"], 1);
    eventually("it is counted", async || {
        let labels = [("outcome", "fetched")];
        trial.cluster.metric("splitrail_unused_hand_offs_total", &labels).await == 1.0
    })
    .await;
    trial.nothing_is_held().await;
}

#[tokio::test]
async fn an_answer_that_has_begun_is_not_bound_by_the_lease() {
    let spec = Spec {
        engine: |name, config| {
            if name == "d0" {
                config.decode_us_per_step = 15_000;
            }
        },
        ..in_turn(1, "lease: 2s")
    };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(30, "long"));
    // Three seconds of steps.
    body["max_tokens"] = 200.into();
    let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    assert_eq!(streamed_text(&chunks, 0).len(), 200);
    let whole = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(whole_text(&whole.json(), 0), streamed_text(&chunks, 0));
    assert_eq!(expired(&trial).await, 0.0);
    trial.finish().await;
}
