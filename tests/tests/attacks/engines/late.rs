//! An engine, or a proxy in front of it, that writes on a kept connection after its reply has
//! ended: these bytes must not become the reply to the next request.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use splitrail_tests::front::Front;
use splitrail_tests::process::Process;
use splitrail_tests::raw_engine::{Asked, RawEngine, Then, Turn, reply};

use super::{ask, echo, no_breaker_is_open, no_echo};
use crate::support::is_full_size;

/// How many clients ask at once, and how often each.
#[derive(Clone, Copy)]
struct Load {
    clients: usize,
    requests_each: usize,
    /// An engine's bytes come so much later at most.
    late_max: Duration,
}

impl Load {
    fn chosen() -> Self {
        match is_full_size() {
            false => Self { clients: 24, requests_each: 100, late_max: Duration::from_millis(4) },
            true => Self { clients: 50, requests_each: 800, late_max: Duration::from_millis(50) },
        }
    }

    /// How many replies without an id may reach another client: one in ten thousand, and at least
    /// two, because few requests may have bad luck.
    fn foreign_max(self) -> usize {
        (self.requests() / 10_000).max(2)
    }

    fn requests(self) -> usize {
        self.clients * self.requests_each
    }

    fn late(self) -> Duration {
        self.late_max.mul_f64(rand::random())
    }
}

/// What became of all requests.
#[derive(Debug, Default)]
struct Outcome {
    right: AtomicUsize,
    /// Another's answer.
    foreign: AtomicUsize,
    failed: AtomicUsize,
}

/// Has clients ask while the engine writes late, each after a time of its own.
async fn run(load: Load, late: fn(Load, &Asked) -> Turn) -> (Outcome, Front) {
    let engine = RawEngine::start(move |asked| late(load, asked)).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    (ask_all(load, &front).await, front)
}

/// Asks as many clients do at once.
///
/// At full size, other threads take the processors away from the router now and then, so that it
/// reads late what has arrived.
#[allow(clippy::print_stderr)]
async fn ask_all(load: Load, front: &Front) -> Outcome {
    let stalls = is_full_size().then(|| std::thread::spawn(|| stall(Duration::from_secs(30))));
    let outcome = Outcome::default();
    join_all((0..load.clients).map(|client| {
        let outcome = &outcome;
        async move {
            for number in 0..load.requests_each {
                let marker = format!("marker-{client}-{number}.");
                let reply = ask(front, &marker).await;
                let counted = match reply.status.as_u16() {
                    200 if reply.text().contains(&marker) => &outcome.right,
                    200 => &outcome.foreign,
                    _ => &outcome.failed,
                };
                counted.fetch_add(1, Relaxed);
                tokio::time::sleep(load.late_max.mul_f64(1.5 * rand::random::<f64>())).await;
            }
        }
    }))
    .await;
    stalls.map(std::thread::JoinHandle::join);
    eprintln!("{} requests: {outcome:?}", load.requests());
    outcome
}

/// An engine that repeats ids, and answers once more after a while.
fn again(load: Load, asked: &Asked) -> Turn {
    let answer = echo(&asked.heard).into_bytes();
    Turn { then: Then::Late(load.late(), answer.clone()), bytes: answer }
}

/// The same without ids.
fn again_without_id(load: Load, asked: &Asked) -> Turn {
    let answer = no_echo(&asked.heard).into_bytes();
    Turn { then: Then::Late(load.late(), answer.clone()), bytes: answer }
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answers_of_an_engine_that_repeats_ids_reach_no_client() {
    let (outcome, front) = run(Load::chosen(), again).await;
    assert_eq!(outcome.foreign.load(Relaxed), 0, "{outcome:?}");
    assert_eq!(outcome.failed.load(Relaxed), 0, "{outcome:?}");
    no_breaker_is_open(&front).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answers_of_an_engine_that_repeats_no_ids_reach_next_to_no_client() {
    let (outcome, front) = run(Load::chosen(), again_without_id).await;
    // An answer that arrives after the next request was written cannot be recognised. But most late
    // answers arrive before, and after the first of those no connection is kept. Where connections
    // are kept and nothing is read before a request, it is one answer in thirty.
    assert!(outcome.foreign.load(Relaxed) <= Load::chosen().foreign_max(), "{outcome:?}");
    no_breaker_is_open(&front).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_shim_late_answers_reach_next_to_no_client() {
    let engine = RawEngine::start(|asked| again_without_id(Load::chosen(), asked)).await;
    let folder = tempfile::tempdir().unwrap();
    let engine_url = engine.url();
    let args = [
        ["--engine", &engine_url],
        ["--listen", "127.0.0.1:0"],
        ["--router", "127.0.0.1:1"],
        ["--role", "both"],
        ["--id", "w0"],
    ];
    let args: Vec<_> = args.concat().into_iter().map(str::to_owned).collect();
    let shim = Process::shim("shim", folder.path(), &args).await;
    let url = format!("http://{}", shim.told("http"));
    let front = Front::start("{}", "", &[url]).await;
    let outcome = ask_all(Load::chosen(), &front).await;
    assert!(outcome.foreign.load(Relaxed) <= Load::chosen().foreign_max(), "{outcome:?}");
    assert_eq!(outcome.failed.load(Relaxed), 0, "{outcome:?}");
    no_breaker_is_open(&front).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_408_and_a_late_end_cost_no_client_an_error() {
    for late in [
        |load: Load, asked: &Asked| {
            let then = Then::Late(load.late(), reply(408, "text/plain", "").into_bytes());
            Turn { bytes: no_echo(&asked.heard).into_bytes(), then }
        },
        |load: Load, asked: &Asked| {
            let then = Then::LateEnd(load.late());
            Turn { bytes: no_echo(&asked.heard).into_bytes(), then }
        },
    ] {
        let (outcome, front) = run(Load::chosen(), late).await;
        assert_eq!(outcome.right.load(Relaxed), Load::chosen().requests(), "{outcome:?}");
        no_breaker_is_open(&front).await;
    }
}

/// Uses a processor for 20 ms of each 40.
fn stall(total: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < total {
        let turn = Instant::now();
        while turn.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
