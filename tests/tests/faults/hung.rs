//! An engine whose generation hangs while its probes are answered: what another worker could serve is
//! served, in every flow, streamed or not.

use std::sync::Arc;

use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::{Cluster, eventually};
use splitrail_tests::trial::{CHAT, Trial, chat, prompt, streamed};
use tokio::task::JoinSet;

/// Requests that are sent at the same time; more than one round of the queue examines by default.
const REQUESTS: usize = 80;

const QUEUED: &str = "{ kind: predicted_ttft }";
const IN_TURN: &str = "{ kind: round_robin }";

fn state(cluster: &Cluster, worker: &str) -> &'static str {
    let serving = cluster.running.core.serving();
    let roster = serving.models[0].pool.roster();
    let found = roster.iter().find(|other| other.id() == worker);
    found.unwrap_or_else(|| panic!("there is no worker {worker}")).state().name()
}

/// Sends a request of its own prompt after a common prefix, every second one streamed if `mixed`.
/// Returns the status; a streamed reply is read to its end.
async fn ask(cluster: &Cluster, number: usize, mixed: bool) -> u16 {
    let text = format!("{}{}", prompt(40, "common"), prompt(4, &format!("own{number}-")));
    let body = chat(&text);
    if mixed && number.is_multiple_of(2) {
        let mut events = cluster.http.stream(CHAT, &streamed(&body)).await;
        if events.status == 200 {
            let _chunks = events.chunks().await;
        }
        return events.status.as_u16();
    }
    cluster.http.post(CHAT, &body).await.status.as_u16()
}

/// The one of two engines that has served most requests hangs: it becomes stuck, and all later
/// requests are served by the others. When it works again, so does the worker.
async fn check_hang(spec: Spec, engines: [&str; 2], mixed: bool) {
    let what = format!("{} {} {engines:?} mixed={mixed}", spec.flow, spec.policy);
    let trial = Trial::start(spec).await;
    for number in 0..8 {
        assert_eq!(ask(&trial.cluster, number, mixed).await, 200, "{what}");
    }
    let [first, second] = trial.counts(engines);
    let hung = engines[usize::from(second > first)];
    let cluster = Arc::new(trial.cluster);
    cluster.engine(hung).set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut held = JoinSet::new();
    let mut sent = 8;
    eventually("the worker is stuck", async || {
        // Few requests at a time, so that the hung engine gets one of them.
        if held.len() < 6 {
            let (cluster, number) = (Arc::clone(&cluster), sent);
            held.spawn(async move { ask(&cluster, number, mixed).await });
            sent += 1;
        }
        while held.try_join_next().is_some() {}
        state(&cluster, hung) == "stuck"
    })
    .await;
    let mut later = JoinSet::new();
    for number in sent..sent + REQUESTS {
        let cluster = Arc::clone(&cluster);
        later.spawn(async move { ask(&cluster, number, mixed).await });
    }
    let statuses = later.join_all().await;
    assert_eq!(statuses, [200; REQUESTS], "{what}");
    assert_eq!(state(&cluster, hung), "stuck", "{what}");
    cluster.engine(hung).clear_faults();
    held.shutdown().await;
    eventually("the worker is back", async || state(&cluster, hung) == "serving").await;
}

#[tokio::test]
async fn a_hung_engine_holds_no_request_that_another_could_serve() {
    for policy in [QUEUED, IN_TURN] {
        for mixed in [true, false] {
            let spec = Spec { policy, ..Spec::aggregated(2) };
            check_hang(spec, ["w0", "w1"], mixed).await;
        }
    }
}

#[tokio::test]
async fn a_hung_prefill_engine_holds_no_request_that_another_could_serve() {
    for policy in [QUEUED, IN_TURN] {
        for flow in ["prefill_first", "decode_first"] {
            // No decode worker serves a prompt alone.
            let model = "cache_hit_threshold: 1".to_owned();
            check_hang(Spec { policy, flow, model, ..Spec::default() }, ["p0", "p1"], true).await;
        }
    }
}

#[tokio::test]
async fn a_hung_decode_engine_holds_no_request_that_another_could_serve() {
    for policy in [QUEUED, IN_TURN] {
        for (flow, mixed) in [("prefill_first", false), ("decode_first", true)] {
            check_hang(Spec { policy, flow, ..Spec::default() }, ["d0", "d1"], mixed).await;
        }
    }
}
