//! An engine, or a proxy before it, that writes on a kept connection after its answer has ended:
//! what it writes must not become the answer to the next request.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;
use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{Asked, RawEngine, Then, Turn, reply};

use super::{ask, echo, no_breaker_is_open, no_echo};

const CLIENTS: usize = 24;
const REQUESTS_EACH: usize = 100;

/// What became of all requests.
#[derive(Debug, Default)]
struct Outcome {
    right: AtomicUsize,
    /// Another's answer.
    foreign: AtomicUsize,
    failed: AtomicUsize,
}

/// Has clients ask while the engine writes late, each after a time of its own.
async fn run(late: fn(&Asked) -> Turn) -> (Outcome, Front) {
    let engine = RawEngine::start(late).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    let outcome = Outcome::default();
    join_all((0..CLIENTS).map(|client| {
        let (outcome, front) = (&outcome, &front);
        async move {
            for number in 0..REQUESTS_EACH {
                let marker = format!("marker-{client}-{number}.");
                let reply = ask(front, &marker).await;
                let counted = match reply.status.as_u16() {
                    200 if reply.text().contains(&marker) => &outcome.right,
                    200 => &outcome.foreign,
                    _ => &outcome.failed,
                };
                counted.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_micros(rand::random_range(0..6000))).await;
            }
        }
    }))
    .await;
    (outcome, front)
}

fn some_time() -> Duration {
    Duration::from_micros(rand::random_range(0..4000))
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answers_of_an_engine_that_repeats_ids_reach_no_client() {
    let (outcome, front) = run(|asked| {
        let answer = echo(&asked.heard).into_bytes();
        Turn { then: Then::Late(some_time(), answer.clone()), bytes: answer }
    })
    .await;
    assert_eq!(outcome.foreign.load(Relaxed), 0, "{outcome:?}");
    assert_eq!(outcome.failed.load(Relaxed), 0, "{outcome:?}");
    no_breaker_is_open(&front).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answers_of_an_engine_that_repeats_no_ids_reach_next_to_no_client() {
    let (outcome, front) = run(|asked| {
        let answer = no_echo(&asked.heard).into_bytes();
        Turn { then: Then::Late(some_time(), answer.clone()), bytes: answer }
    })
    .await;
    // An answer that arrives after the next request was written cannot be recognised. But most late
    // answers arrive before, and after the first of those no connection is kept. Where connections
    // are kept and nothing is read before a request, it is one answer in thirty.
    assert!(outcome.foreign.load(Relaxed) <= CLIENTS * REQUESTS_EACH / 1000, "{outcome:?}");
    no_breaker_is_open(&front).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_408_and_a_late_end_cost_no_client_an_error() {
    for late in [
        |asked: &Asked| {
            let then = Then::Late(some_time(), reply(408, "text/plain", "").into_bytes());
            Turn { bytes: no_echo(&asked.heard).into_bytes(), then }
        },
        |asked: &Asked| {
            let then = Then::LateEnd(some_time());
            Turn { bytes: no_echo(&asked.heard).into_bytes(), then }
        },
    ] {
        let (outcome, front) = run(late).await;
        assert_eq!(outcome.right.load(Relaxed), CLIENTS * REQUESTS_EACH, "{outcome:?}");
        no_breaker_is_open(&front).await;
    }
}
