//! Clients that leave, at each phase of a request, over each protocol and in each way: many at a
//! time, and afterwards nothing is held for any of them.
//!
//! `tests/tests/clients/disconnect.rs` has what else a request over HTTP/1.1 can be: not streamed, a
//! batch, recorded.

mod visitor;

use futures_util::future::join_all;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{SHORT_LEASE, Trial, prompt};

use visitor::{Ask, Leaving, Protocol, Visitor, WAYS};

/// Clients that leave at the same time.
const VISITORS: usize = 20;
/// All clients of a phase.
const ALL: usize = VISITORS * WAYS.len();

/// What a request counts whose body is still arriving; docs/limits.md.
const ARRIVING_BYTES: usize = 16 << 10;

/// No step of an engine ends within a test.
const ENDLESS_US: u64 = 600_000_000;

fn one_each(engine: fn(&str, &mut SimConfig)) -> Spec {
    Spec { prefill: 1, decode: 1, engine, ..Spec::default() }
}

/// A completion whose prompt shares no block with another's.
fn completion(salt: &str) -> Ask {
    Ask::Completion(prompt(40, salt))
}

/// Clients that have sent this share of their requests.
async fn visitors(
    trial: &Trial,
    protocol: Protocol,
    ask: impl Fn(usize) -> Ask,
    share: f64,
) -> Vec<Visitor> {
    let begun = (0..VISITORS).map(|place| {
        let ask = ask(place);
        async move { Visitor::begin(trial, protocol, &ask, share).await }
    });
    join_all(begun).await
}

async fn leave(visitors: Vec<Visitor>, way: Leaving) -> Vec<Option<Visitor>> {
    join_all(visitors.into_iter().map(|visitor| visitor.leave(way))).await
}

/// Has clients send whole completions and leave once all of them are where `reached` waits for.
async fn leave_from(trial: &Trial, mut reached: impl AsyncFnMut(&mut Vec<Visitor>)) {
    for (turn, (protocol, way)) in WAYS.into_iter().enumerate() {
        let ask = |place| completion(&format!("{turn}w{place}v"));
        let mut visitors = visitors(trial, protocol, ask, 1.0).await;
        reached(&mut visitors).await;
        let _stays = leave(visitors, way).await;
        nothing_is_left(trial, &format!("{protocol:?} {way:?}")).await;
    }
}

/// Waits until all gauges of requests are back at zero.
async fn nothing_is_left(trial: &Trial, after: &str) {
    trial.cluster.quiet().await;
    trial.nothing_is_held().await;
    eventually(&format!("{after}: the memory of requests is given back"), async || {
        trial.cluster.metric("splitrail_request_memory_bytes", &[]).await == 0.0
            && trial.cluster.metric("splitrail_queue_depth", &[]).await == 0.0
    })
    .await;
}

/// The engines keep no block for anybody, and each client was counted as one that left.
async fn all_have_left(trial: &Trial) {
    trial.staged_blocks_are_freed().await;
    are_cancelled(trial, ALL).await;
}

/// Waits until all requests are counted as cancelled, and there were so many.
async fn are_cancelled(trial: &Trial, requests: usize) {
    let cancelled = [("outcome", "cancelled")];
    eventually("each is counted as cancelled", async || {
        trial.cluster.metric("splitrail_requests_total", &cancelled).await == requests as f64
    })
    .await;
    assert_eq!(trial.cluster.metric("splitrail_requests_total", &[]).await, requests as f64);
}

fn aborted(trial: &Trial, engine: &str) -> usize {
    trial.cluster.engine(engine).state().totals.aborted as usize
}

/// Waits until an engine has the requests of all clients in hand.
async fn all_run(trial: &Trial, engine: &str) {
    eventually(&format!("{engine} has them all"), async || {
        let state = trial.cluster.engine(engine).state();
        state.running + state.waiting == VISITORS
    })
    .await;
}

/// Waits until so much memory is charged for the request of each client.
async fn all_are_charged(trial: &Trial, each_bytes: usize) {
    eventually("the router has them all", async || {
        let charged = trial.cluster.metric("splitrail_request_memory_bytes", &[]).await;
        charged >= (VISITORS * each_bytes) as f64
    })
    .await;
}

#[tokio::test]
async fn leaving_while_the_body_is_sent_asks_no_engine() {
    // Nothing but the end of the client ends the wait for its body.
    let limits = "{ body_grace: 600s, body_timeout: 600s, drain_delay: 10ms, drain_grace: 5s }";
    let trial = Trial::start(Spec { limits, ..one_each(|_, _| {}) }).await;
    for share in [0.0, 0.5] {
        for (protocol, way) in WAYS {
            let visitors = visitors(&trial, protocol, |_| completion("body"), share).await;
            all_are_charged(&trial, ARRIVING_BYTES).await;
            let _stays = leave(visitors, way).await;
            nothing_is_left(&trial, &format!("{protocol:?} {way:?} {share}")).await;
        }
    }
    are_cancelled(&trial, 2 * ALL).await;
    assert_eq!(trial.counts(["p0", "d0"]), [0, 0]);
}

/// The template takes hours for a chat of some thousand messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_while_the_chat_is_rendered_asks_no_engine() {
    const ENDLESS: &str = "{% for a in messages %}{% for b in messages %}{% for c in messages %}\
        {% set d = c['content'] %}{% endfor %}{% endfor %}{% endfor %}x";
    const MESSAGES: usize = 1000;
    let files = tempfile::tempdir().unwrap();
    let template = files.path().join("endless.jinja");
    std::fs::write(&template, ENDLESS).unwrap();
    let trial = Trial::start(Spec {
        limits: "{ template_timeout: 24h, drain_delay: 10ms, drain_grace: 5s }",
        tokenizer_keys: format!(", chat_template: {:?}", template.display().to_string()),
        ..one_each(|_, _| {})
    })
    .await;
    for (protocol, way) in WAYS {
        let ask = |_| Ask::Chat(MESSAGES, "word ".into());
        let visitors = visitors(&trial, protocol, ask, 1.0).await;
        eventually("the bodies of all are complete", async || {
            let core = &trial.cluster.running.core;
            core.serving().limits.in_flight_max - core.in_flight.free() == VISITORS
        })
        .await;
        assert!(trial.cluster.running.core.live.is_empty(), "none was placed");
        let _stays = leave(visitors, way).await;
        nothing_is_left(&trial, &format!("{protocol:?} {way:?}")).await;
    }
    assert_eq!(trial.counts(["p0", "d0"]), [0, 0]);
}

#[tokio::test]
async fn leaving_the_queue_asks_no_engine() {
    let trial = Trial::start(Spec {
        policy: "{ kind: predicted_ttft }",
        model: "queue: {}\ncosts: { prefill_us_per_token: 1000 }\n".into(),
        ..one_each(|name, config| {
            if name == "p0" {
                config.prefill_us_per_token = ENDLESS_US;
            }
        })
    })
    .await;
    let first = Ask::Completion(prompt(1000, "first"));
    let first = Visitor::begin(&trial, Protocol::Http1, &first, 1.0).await;
    trial.until_running("p0").await;
    let waiting = async |wanted: usize| {
        eventually(&format!("{wanted} wait"), async || {
            let metric = |name| trial.cluster.metric(name, &[]);
            metric("splitrail_queue_depth").await == wanted as f64
                && metric("splitrail_requests_in_flight").await == wanted as f64 + 1.0
        })
        .await;
    };
    for (turn, (protocol, way)) in WAYS.into_iter().enumerate() {
        let ask = |place| completion(&format!("{turn}w{place}v"));
        let visitors = visitors(&trial, protocol, ask, 1.0).await;
        waiting(VISITORS).await;
        let _stays = leave(visitors, way).await;
        waiting(0).await;
    }
    assert_eq!(trial.counts(["p0", "d0"]), [1, 0]);
    first.leave(Leaving::Reset).await;
    nothing_is_left(&trial, "the first one has left as well").await;
}

#[tokio::test]
async fn leaving_while_prefill_runs_ends_it() {
    let trial = Trial::start(one_each(|name, config| {
        if name == "p0" {
            config.decode_us_per_step = ENDLESS_US;
        }
    }))
    .await;
    leave_from(&trial, async |_| all_run(&trial, "p0").await).await;
    all_have_left(&trial).await;
    assert_eq!(aborted(&trial, "p0"), ALL);
    assert!(trial.asked("d0").is_empty(), "decode was never asked");
}

/// The decode engine has the hand-off, and fetches nothing: leases end what prefill staged.
#[tokio::test]
async fn leaving_between_the_legs_frees_what_prefill_staged() {
    let trial = Trial::start(one_each(|_, config| {
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    }))
    .await;
    trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 600_000 }, None);
    let mut asked = 0;
    leave_from(&trial, async |_| {
        asked += VISITORS;
        eventually("decode is asked by all", async || trial.asked("d0").len() == asked).await;
    })
    .await;
    all_have_left(&trial).await;
}

#[tokio::test]
async fn leaving_before_the_first_token_ends_decode_and_frees_what_prefill_staged() {
    let trial = Trial::start(one_each(|name, config| {
        if name == "d0" {
            config.decode_us_per_step = ENDLESS_US;
        }
    }))
    .await;
    leave_from(&trial, async |_| all_run(&trial, "d0").await).await;
    all_have_left(&trial).await;
    assert_eq!(aborted(&trial, "d0"), ALL);
}

/// At the first token, and in mid-stream.
#[tokio::test]
async fn leaving_once_tokens_come_ends_decode() {
    for events in [1, 5] {
        let trial = Trial::start(one_each(|name, config| {
            if name == "d0" {
                config.decode_us_per_step = 20_000;
            }
        }))
        .await;
        leave_from(&trial, async |visitors| {
            join_all(visitors.iter_mut().map(|visitor| visitor.events(events))).await;
        })
        .await;
        all_have_left(&trial).await;
        assert_eq!(aborted(&trial, "d0"), ALL, "after {events} events");
    }
}
