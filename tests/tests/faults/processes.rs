//! Real processes: engines that are killed, and a router that is told to stop.

use serde_json::{Value, json};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Processes;
use splitrail_tests::trial::{CHAT, COMPLETIONS, broken_off, chat, completion, either, prompt};
use splitrail_tests::{Client, Events};

const LIMITS: &str = "{ drain_delay: 100ms, drain_grace: 20s }";

fn arguments(all: &[(&str, u64)]) -> Vec<String> {
    let pairs = all.iter();
    pairs.flat_map(|(flag, value)| [format!("--{flag}"), value.to_string()]).collect()
}

/// Engines that take no time.
fn quick(_: &str) -> Vec<String> {
    arguments(&[("prefill-us-per-token", 0), ("decode-us-per-step", 0)])
}

/// A step of prefill takes long enough to be interrupted.
fn slow_prefill(name: &str) -> Vec<String> {
    match name.starts_with('p') {
        true => arguments(&[("decode-us-per-step", 4_000_000)]),
        false => quick(name),
    }
}

/// Generation takes long enough to be interrupted.
fn slow_decode(name: &str) -> Vec<String> {
    match name.starts_with('d') {
        true => arguments(&[("decode-us-per-step", 20_000)]),
        false => quick(name),
    }
}

/// The right text, from an engine that does it all by itself.
async fn expected(engine: &Client, path: &str, body: &Value) -> String {
    whole_text(&engine.post(path, body).await.json(), 0)
}

/// The place of the engine that has a request running.
async fn busy(processes: &Processes, places: &[usize]) -> usize {
    let mut found = None;
    eventually("an engine has a request running", async || {
        for place in places {
            let client = processes.engines[*place].client("http");
            if client.get("/sim/state").await.json()["running"] != 0 {
                found = Some(*place);
            }
        }
        found.is_some()
    })
    .await;
    found.unwrap()
}

async fn outcomes(processes: &Processes, outcome: &str) -> f64 {
    let labels = [("outcome", outcome)];
    processes.metric("splitrail_requests_total", &labels).await
}

/// Nothing in flight, nothing booked.
async fn quiet(processes: &Processes) {
    eventually("nothing is in flight or booked", async || {
        let mut held = 0.0;
        for gauge in ["requests_in_flight", "worker_requests", "worker_prefill_tokens"] {
            held += processes.metric(&format!("splitrail_{gauge}"), &[]).await;
        }
        let live = processes.admin.get("/admin/requests").await.json();
        held == 0.0 && live == json!({"requests": []})
    })
    .await;
}

#[tokio::test]
async fn a_prefill_engine_killed_while_idle_costs_no_request() {
    let mut processes = Processes::start(&["p0", "p1", "d0"], quick, LIMITS).await;
    let d0 = processes.engines[2].client("http");
    // Both have been used: the router has connections to both.
    for turn in 0..8 {
        let (path, body) = either(turn, &prompt(30, &format!("warm{turn}-")));
        assert_eq!(processes.http.post(path, &body).await.status, 200);
    }
    processes.engines[0].kill();
    for turn in 0..6 {
        let (path, body) = either(turn, &prompt(30, &format!("idle{turn}-")));
        let reply = processes.http.post(path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("prefill"), Some("p1"));
        assert_eq!(whole_text(&reply.json(), 0), expected(&d0, path, &body).await);
    }
    eventually("the router knows that it is gone", async || {
        let labels = [("worker", "p0")];
        processes.metric("splitrail_worker_up", &labels).await == 0.0
    })
    .await;
    quiet(&processes).await;
    assert_eq!(outcomes(&processes, "ok").await, 14.0);
    assert_eq!(processes.metric("splitrail_requests_total", &[]).await, 14.0);
}

#[tokio::test]
async fn a_busy_prefill_engine_that_is_killed_is_replaced_before_the_first_byte() {
    let mut processes = Processes::start(&["p0", "p1", "d0"], slow_prefill, LIMITS).await;
    let d0 = processes.engines[2].client("http");
    let body = chat(&prompt(40, "work"));
    let right = expected(&d0, CHAT, &body).await;
    let client = processes.http.clone();
    let death = async {
        let place = busy(&processes, &[0, 1]).await;
        processes.engines[place].kill();
        place
    };
    let (reply, killed) = tokio::join!(client.post(CHAT, &body), death);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), right);
    assert_eq!(reply.route("prefill"), Some(["p1", "p0"][killed]));
    assert_eq!(processes.metric("splitrail_retries_total", &[("leg", "prefill")]).await, 1.0);
    quiet(&processes).await;
    assert_eq!(outcomes(&processes, "ok").await, 1.0);
}

/// A stream of which a few events have come, with them.
async fn begun(processes: &Processes, body: &Value) -> (Events, Vec<String>) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut events = processes.http.stream(COMPLETIONS, &body).await;
    assert_eq!(events.status, 200);
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(events.next().await.expect("an event"));
    }
    (events, seen)
}

#[tokio::test]
async fn a_decode_engine_killed_during_the_stream_is_an_error_event() {
    let mut processes = Processes::start(&["p0", "d0", "d1"], slow_decode, LIMITS).await;
    let mut body = completion(&prompt(40, "mid"));
    body["max_tokens"] = 1000.into();
    let (mut events, mut seen) = begun(&processes, &body).await;
    let place = busy(&processes, &[1, 2]).await;
    processes.engines[place].kill();
    seen.extend(events.rest().await);
    let (chunks, error) = broken_off(&seen);
    assert!(chunks.len() >= 4, "what came is passed on");
    assert_eq!(error["code"], "decode_lost");
    quiet(&processes).await;
    assert_eq!(outcomes(&processes, "decode_lost").await, 1.0);
    // The other one takes over for whoever asks again.
    body["max_tokens"] = 5.into();
    let reply = processes.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("decode"), Some(["", "d1", "d0"][place]));
    let other = processes.engines[3 - place].client("http");
    let right = expected(&other, COMPLETIONS, &body).await;
    assert_eq!(whole_text(&reply.json(), 0), right);
    assert_eq!(processes.metric("splitrail_requests_total", &[]).await, 2.0);
}

#[tokio::test]
async fn a_decode_engine_killed_before_a_whole_reply_is_replaced_with_a_new_prefill() {
    let mut processes = Processes::start(&["p0", "d0", "d1"], slow_decode, LIMITS).await;
    let mut body = completion(&prompt(40, "whole"));
    body["max_tokens"] = 150.into();
    let client = processes.http.clone();
    let death = async {
        let place = busy(&processes, &[1, 2]).await;
        processes.engines[place].kill();
        place
    };
    let (reply, killed) = tokio::join!(client.post(COMPLETIONS, &body), death);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("decode"), Some(["", "d1", "d0"][killed]));
    let other = processes.engines[3 - killed].client("http");
    let right = expected(&other, COMPLETIONS, &body).await;
    assert_eq!(whole_text(&reply.json(), 0), right);
    let asked = processes.engines[0].client("http").get("/sim/requests").await.json();
    assert_eq!(asked.as_array().unwrap().len(), 2, "a prefill per attempt");
    assert_eq!(processes.metric("splitrail_retries_total", &[("leg", "decode")]).await, 1.0);
    quiet(&processes).await;
    assert_eq!(outcomes(&processes, "ok").await, 1.0);
}

#[tokio::test]
async fn requests_get_typed_errors_when_all_engines_are_killed() {
    let mut processes = Processes::start(&["p0", "d0"], quick, LIMITS).await;
    assert_eq!(processes.http.post(CHAT, &chat("before")).await.status, 200);
    for engine in &mut processes.engines {
        engine.kill();
    }
    for turn in 0..4 {
        let (path, body) = either(turn, &prompt(30, "none"));
        let reply = processes.http.post(path, &body).await;
        assert!([502, 503].contains(&reply.status.as_u16()), "{}", reply.text());
        splitrail_tests::trial::error_of(&reply.json());
    }
    eventually("the router says that it is not ready", async || {
        processes.http.get("/ready").await.status == 503
    })
    .await;
    quiet(&processes).await;
    assert_eq!(processes.metric("splitrail_requests_total", &[]).await, 5.0);
}

#[tokio::test]
async fn a_restarted_engine_is_used_again_with_a_new_index() {
    let mut processes = Processes::start(&["p0", "d0"], quick, LIMITS).await;
    let body = chat(&prompt(60, "again"));
    let d0 = processes.engines[1].client("http");
    let right = expected(&d0, CHAT, &body).await;
    let cached = async |processes: &Processes| {
        let reply = processes.http.post(CHAT, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), right);
        let route = ["prefill", "overlap_blocks"].map(|key| reply.route(key).map(str::to_owned));
        let usage = &reply.json()["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (route, cached, usage["prompt_tokens"].as_u64().unwrap())
    };
    let p0_blocks = async |processes: &Processes| {
        let labels = [("worker", "p0"), ("tier", "device")];
        processes.metric("splitrail_index_blocks", &labels).await
    };
    let worker = |blocks: u64| [Some("p0".to_owned()), Some(blocks.to_string())];
    let (route, cold, prompt_tokens) = cached(&processes).await;
    assert_eq!((route, cold), (worker(0), 0));
    let full_blocks = (prompt_tokens / 16) as f64;
    eventually("the index has the prompt", async || p0_blocks(&processes).await >= full_blocks)
        .await;
    let warm = cached(&processes).await;
    assert_eq!(warm.1, (prompt_tokens - 1) / 16 * 16);

    processes.engines[0].kill();
    eventually("the router knows that it is gone", async || {
        processes.metric("splitrail_worker_up", &[("worker", "p0")]).await == 0.0
    })
    .await;
    processes.restart(0).await;
    eventually("it is up, and nothing is in the index of it", async || {
        processes.metric("splitrail_worker_up", &[("worker", "p0")]).await == 1.0
            && p0_blocks(&processes).await == 0.0
    })
    .await;
    // Another process with an empty cache: no overlap, and no cached token is told.
    let (route, cold, _) = cached(&processes).await;
    assert_eq!((route, cold), (worker(0), 0));
    eventually("the index has the prompt again", async || {
        p0_blocks(&processes).await >= full_blocks
    })
    .await;
    assert_eq!(cached(&processes).await, warm, "as with the first process");
    quiet(&processes).await;
}

#[tokio::test]
async fn a_stopping_router_finishes_its_streams_and_accepts_for_a_while() {
    let limits = "{ drain_delay: 3s, drain_grace: 60s }";
    let mut processes = Processes::start(&["p0", "d0"], slow_decode, limits).await;
    // Longer than the delay: they are in flight when accepting ends.
    let mut body = completion(&prompt(20, "drain"));
    body["max_tokens"] = 250.into();
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(begun(&processes, &body).await);
    }
    assert_eq!(processes.http.get("/ready").await.status, 200);
    processes.router.terminate();
    eventually("the router says that it is not ready", async || {
        // A new connection each time, as a balancer's probe.
        let probe = processes.router.client("http");
        probe.get("/ready").await.status == 503
    })
    .await;
    // Not ready is not closed: who comes now is served.
    let late = processes.router.client("http");
    assert_eq!(late.get("/health").await.status, 200);
    let mut short = completion("late");
    short["max_tokens"] = 2.into();
    let reply = late.post(COMPLETIONS, &short).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let right = expected(&processes.engines[1].client("http"), COMPLETIONS, &body).await;
    for (mut events, seen) in streams {
        let mut chunks: Vec<Value> =
            seen.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        chunks.extend(events.chunks().await);
        assert_eq!(streamed_text(&chunks, 0), right, "whole to its last token");
    }
    let status = processes.router.ended().await;
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn a_second_signal_ends_the_router_at_once() {
    let limits = "{ drain_delay: 1h, drain_grace: 1h }";
    let mut processes = Processes::start(&["p0", "d0"], slow_decode, limits).await;
    let mut body = completion(&prompt(20, "twice"));
    body["max_tokens"] = 20_000.into();
    let (mut events, _) = begun(&processes, &body).await;
    processes.router.terminate();
    eventually("the router says that it is not ready", async || {
        processes.router.client("http").get("/ready").await.status == 503
    })
    .await;
    assert!(events.next().await.is_some(), "the stream goes on");
    assert!(processes.router.runs(), "one signal only begins the end");
    processes.router.terminate();
    processes.router.ended().await;
    let rest = events.rest().await;
    assert!(!rest.contains(&"[DONE]".to_owned()), "cut off, and not as if it were whole");
    // Its engine is told, like by any client that leaves.
    processes.until_running(1, |running| running == 0).await;
}

#[tokio::test]
async fn an_idle_router_that_is_stopped_exits_with_0() {
    let limits = "{ drain_delay: 50ms, drain_grace: 1h }";
    let mut processes = Processes::start(&["p0", "d0"], quick, limits).await;
    assert_eq!(processes.http.post(CHAT, &chat("hello")).await.status, 200);
    // The client's connection stays open; it does not hold the router up.
    processes.router.terminate();
    let status = processes.router.ended().await;
    assert!(status.success(), "{status}");
}
