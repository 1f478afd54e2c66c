//! A batch is as many requests as it has prompts.

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_tests::client::{Client, Reply, streamed_text, whole_text};
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::proc::open_files;
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::{Solo, answer_of, whole_reply};

const COMPLETIONS: &str = "/v1/completions";

/// Prompts of a batch.
const PROMPTS: usize = 16;

/// Answers wait until the engine is told to let go, those of one client's requests at once.
fn held_for_batches(heard: &splitrail_tests::scripted_server::ReceivedRequest) -> ScriptedReply {
    let ScriptedReply::Bytes(whole) = whole_reply() else { unreachable!("a whole answer") };
    match heard.text().contains("single") {
        true => ScriptedReply::Bytes(whole),
        false => ScriptedReply::Held { first: Vec::new(), last: whole },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_shed_by_their_prompts_and_other_clients_are_served() {
    let limits = "{ in_flight_max: 90, fair_by: { kind: header, name: x-api-key } }";
    let solo = Solo::start(limits, held_for_batches).await;
    let files = open_files(solo.router.pid());
    let body = json!({"model": "sim", "max_tokens": 1, "prompt": vec!["a"; PROMPTS]});
    let ask = |_: usize| async {
        let headers = [("x-api-key", "greedy")];
        let client = Client::new(solo.router.http);
        client.post_with(COMPLETIONS, &headers, body.to_string()).await
    };
    // 80 of 90 are a single client's share: five batches.
    let served = join_all((0..5).map(ask));
    let others = async {
        eventually("the greedy client has its share", async || solo.post.open() == 5 * PROMPTS)
            .await;
        let shed = join_all((0..25).map(ask)).await;
        let legs = solo.post.heard().iter().filter(|heard| heard.is_inference()).count();
        assert_eq!(legs, 5 * PROMPTS, "no leg of a batch that was shed was sent");
        let taken = open_files(solo.router.pid()).saturating_sub(files);
        assert!(taken <= 3 * 90, "{taken} files for 90 places");
        for _ in 0..10 {
            let single = json!({"model": "sim", "prompt": "single"});
            let headers = [("x-api-key", "modest")];
            let reply = solo.http.post_with(COMPLETIONS, &headers, single.to_string()).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        solo.post.release();
        shed
    };
    let (served, shed) = futures_util::future::join(served, others).await;
    assert!(served.iter().all(|reply| reply.status == 200));
    let is_shed = |reply: &Reply| reply.status == 429 && !reply.header("retry-after").is_empty();
    assert!(shed.iter().all(is_shed));
    let shed = [("reason", "fair_share")];
    assert_eq!(solo.metric("splitrail_shed_total", &shed).await, 25.0);
    // All places are free again.
    eventually("a batch finds room", async || ask(30).await.status == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_finds_no_room_for_all_its_prompts_is_shed_whole() {
    let solo = Solo::start("{ in_flight_max: 40 }", held_for_batches).await;
    let body =
        |prompts: usize| json!({"model": "sim", "max_tokens": 1, "prompt": vec!["a"; prompts]});
    let large = body(32);
    let first = solo.http.post(COMPLETIONS, &large);
    let others = async {
        eventually("it is served", async || solo.post.open() >= 32).await;
        let shed = Client::new(solo.router.http).post(COMPLETIONS, &body(16)).await;
        assert_eq!((shed.status.as_u16(), shed.header("retry-after")), (503, "1"));
        assert!(shed.text().contains("limits.in_flight_max"), "{}", shed.text());
        let never = Client::new(solo.router.http).post(COMPLETIONS, &body(41)).await;
        assert_eq!(never.status, 400, "there is never room for it: {}", never.text());
        let single = json!({"model": "sim", "prompt": "single"});
        assert_eq!(Client::new(solo.router.http).post(COMPLETIONS, &single).await.status, 200);
        solo.post.release();
    };
    let (first, ()) = futures_util::future::join(first, others).await;
    assert_eq!(first.status, 200, "{}", first.text());
}

/// The text of an answer to a prompt of a batch.
fn long_text(prompt: &str) -> String {
    format!("{prompt} ").repeat((64 << 10) / (prompt.len() + 1))
}

/// The answers of an engine, which are long for prompts of batches and held until it lets go.
fn long_for_batches(heard: &splitrail_tests::scripted_server::ReceivedRequest) -> ScriptedReply {
    let body: Value = serde_json::from_slice(&heard.body).unwrap();
    let prompt = body["prompt"].as_str().unwrap();
    if prompt == "single" {
        return whole_reply();
    }
    let text = long_text(prompt);
    if body["stream"] != true {
        let ScriptedReply::Bytes(last) = answer_of(&text) else { unreachable!("a whole answer") };
        return ScriptedReply::Held { first: Vec::new(), last };
    }
    let event = |text: &str, end: Option<&str>| {
        let event = json!({
            "id": "x", "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": text, "finish_reason": end}],
        });
        format!("data: {event}\n\n")
    };
    let (first, last) = text.split_at(text.len() / 2);
    let first = [STREAM_HEAD, event(first, None).as_bytes()].concat();
    let last = event(last, Some("stop")) + "data: [DONE]\n\n";
    ScriptedReply::Held { first, last: last.into_bytes() }
}

/// What became of a batch: its status, `Retry-After`, and the texts of its answers.
type Outcome = (u16, String, Vec<String>);

async fn batch(solo: &Solo, place: usize, is_streamed: bool) -> Outcome {
    let prompts: Vec<String> = (0..PROMPTS).map(|i| format!("b{place}p{i}")).collect();
    let body = json!({
        "model": "sim", "max_tokens": 9, "prompt": prompts, "stream": is_streamed,
    });
    let client = Client::new(solo.router.http);
    let headers = [("x-api-key", "greedy")];
    if !is_streamed {
        let reply = client.post_with(COMPLETIONS, &headers, body.to_string()).await;
        let (status, retry) = (reply.status.as_u16(), reply.header("retry-after").to_owned());
        let texts = match status {
            200 => (0..PROMPTS).map(|i| whole_text(&reply.json(), i)).collect(),
            _ => Vec::new(),
        };
        return (status, retry, texts);
    }
    let mut events = client.stream_with(COMPLETIONS, &headers, &body).await;
    let status = events.status.as_u16();
    let retry = events.headers.get("retry-after").map_or("", |value| value.to_str().unwrap());
    let retry = retry.to_owned();
    let texts = match status {
        200 => {
            let chunks = events.chunks().await;
            (0..PROMPTS as u64).map(|i| streamed_text(&chunks, i)).collect()
        }
        _ => Vec::new(),
    };
    (status, retry, texts)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_with_long_answers_beyond_the_room_are_shed_and_leave_nothing_behind() {
    const BATCHES: usize = 40;
    let limits = "{ in_flight_max: 180, fair_by: { kind: header, name: x-api-key } }";
    let solo = Solo::start(limits, long_for_batches).await;
    let batches = (0..BATCHES).map(|place| batch(&solo, place, place % 2 == 1));
    let others = async {
        // 160 of 180 are a single client's share: ten batches.
        eventually("the room for batches is taken", async || {
            solo.metric("splitrail_shed_total", &[]).await >= (BATCHES - 10) as f64
                && solo.post.open() >= 10 * PROMPTS
        })
        .await;
        let single = json!({"model": "sim", "prompt": "single"}).to_string();
        let headers = [("x-api-key", "modest")];
        for _ in 0..20 {
            let reply = solo.http.post_with(COMPLETIONS, &headers, single.clone()).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        solo.post.release();
    };
    let (outcomes, ()) = futures_util::future::join(join_all(batches), others).await;
    let mut served = 0;
    for (place, (status, retry, texts)) in outcomes.into_iter().enumerate() {
        match status {
            200 => {
                served += 1;
                let right: Vec<_> =
                    (0..PROMPTS).map(|i| long_text(&format!("b{place}p{i}"))).collect();
                assert!(texts == right, "batch {place} has the answers to its own prompts");
            }
            429 | 503 => assert!(!retry.is_empty(), "batch {place}: {status}"),
            _ => panic!("batch {place}: {status}"),
        }
    }
    assert_eq!(served, 10);
    eventually("nothing is held for a batch", async || {
        let scrape = solo.admin.get("/metrics").await.text();
        [
            "splitrail_requests_in_flight",
            "splitrail_request_memory_bytes",
            "splitrail_queue_depth",
            "splitrail_worker_requests",
            "splitrail_worker_prefill_tokens",
        ]
        .iter()
        .all(|name| scrape.contains(name) && metric_in(&scrape, name, &[]) == 0.0)
    })
    .await;
    // Each of the places is free again.
    let all = (0..10).map(|place| batch(&solo, place, false));
    assert!(join_all(all).await.iter().all(|(status, ..)| *status == 200));
}
