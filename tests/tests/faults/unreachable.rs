//! Unreachable workers: other workers are used if there are any; otherwise the client gets a typed
//! error.

use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::trial::{Reference, Trial, either, error_of, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

async fn up(cluster: &Cluster, worker: &str) -> f64 {
    cluster.metric("splitrail_worker_up", &[("worker", worker)]).await
}

#[tokio::test]
async fn unreachable_workers_get_no_requests() {
    let reference = Reference::start().await;
    let gone = [HeldPort::take(), HeldPort::take()];
    let spec = Spec {
        prefill: 1,
        decode: 1,
        policy: "{ kind: round_robin }",
        extra_workers: vec![gone[0].worker("p9", "prefill"), gone[1].worker("d9", "decode")],
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    for turn in 0..6 {
        if turn == 3 {
            // From here on the router knows; before, it may have to find out.
            eventually("the router knows who is gone", async || {
                up(&trial.cluster, "p9").await + up(&trial.cluster, "d9").await == 0.0
            })
            .await;
        }
        let (path, body) = either(turn, &prompt(30, &format!("l{turn}-")));
        let expected = reference.text(path, &body).await;
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), expected);
        assert_eq!([reply.route("prefill"), reply.route("decode")], [Some("p0"), Some("d0")]);
        let mut events = trial.stream("ok", path, &body).await;
        assert_eq!(streamed_text(&events.chunks().await, 0), expected);
    }
    assert_eq!(up(&trial.cluster, "p0").await + up(&trial.cluster, "d0").await, 2.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_model_without_a_living_prefill_worker_is_served_by_its_decode_workers() {
    let reference = Reference::start().await;
    let gone = HeldPort::take();
    let spec = Spec {
        prefill: 0,
        decode: 1,
        extra_workers: vec![gone.worker("p9", "prefill")],
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    for turn in 0..2 {
        let (path, body) = either(turn, &prompt(30, "m"));
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), reference.text(path, &body).await);
        assert_eq!(reply.route("local"), Some("no_prefill"));
    }
    assert_eq!(trial.local_prefills().await, 2.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_model_with_only_dead_workers_is_a_typed_error_at_once_and_not_ready() {
    for (on_no_prefill, statuses, outcome) in
        [("local", [502, 502], "engine_unreachable"), ("fail", [503, 503], "no_worker")]
    {
        let gone = [HeldPort::take(), HeldPort::take()];
        let spec = Spec {
            prefill: 0,
            decode: 0,
            policy: "{ kind: least_loaded }",
            model: format!("on_no_prefill: {on_no_prefill}"),
            extra_workers: vec![gone[0].worker("p9", "prefill"), gone[1].worker("d9", "decode")],
            ..Spec::default()
        };
        let mut trial = Trial::start(spec).await;
        eventually("the router says that it is not ready", async || {
            trial.cluster.http.get("/ready").await.status == 503
        })
        .await;
        assert_eq!(trial.cluster.http.get("/health").await.status, 200, "the process is well");
        for (turn, status) in statuses.into_iter().enumerate() {
            let (path, body) = either(turn, &prompt(30, "n"));
            for body in [body.clone(), streamed(&body)] {
                let reply = trial.post(outcome, path, &body).await;
                assert_eq!(reply.status, status, "{}", reply.text());
                error_of(&reply.json());
                let retry_after = reply.header("retry-after");
                assert_eq!(retry_after.is_empty(), status != 503, "{retry_after:?}");
            }
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_aggregated_model_with_only_dead_workers_is_a_typed_error() {
    let gone = [HeldPort::take(), HeldPort::take()];
    let spec = Spec {
        policy: "{ kind: least_loaded }",
        extra_workers: vec![gone[0].worker("w8", "both"), gone[1].worker("w9", "both")],
        ..Spec::aggregated(0)
    };
    let mut trial = Trial::start(spec).await;
    for turn in 0..3 {
        let (path, body) = either(turn, &prompt(30, "o"));
        let reply = trial.post("engine_unreachable", path, &body).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
        error_of(&reply.json());
    }
    trial.finish().await;
}
