//! Clients that send all the frames that carry nothing which their budget allows, and no more.

use futures_util::future::{join, join_all};
use serde_json::json;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::proc::{memory, processor_time, reset_peak};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, whole_reply};

const COMPLETIONS: &str = "/v1/completions";

/// Connections for each kind of frame.
const CONNECTIONS: usize = 10;

/// Requests whose processor time is the measure.
const REQUESTS: usize = 200;

/// What the clients may make the router grow by.
const GROWTH_KIB: u64 = 10 << 10;

/// The end of what a client has to send, which the router answers.
const LAST_PING: [u8; 8] = *b"the last";

/// Frames of one kind.
struct Kind {
    name: &'static str,
    frame: Vec<u8>,
    /// How many a connection sends: nearly all that it may send in ten seconds.
    count: usize,
    /// How many of them may together cost the router as much as one request.
    per_request: usize,
}

fn kinds() -> [Kind; 3] {
    let of = |name, frame, count, per_request| Kind { name, frame, count, per_request };
    [
        of("PING", frames::frame(kind::PING, 0, 0, &[7; 8]), 950, 10),
        of("SETTINGS", frames::frame(kind::SETTINGS, 0, 0, &[]), 950, 10),
        // A fiftieth of what it may.
        of("WINDOW_UPDATE", frames::window(0, 1), 20_000, 100),
    ]
}

fn completion(prompt: &str) -> serde_json::Value {
    json!({"model": "sim", "max_tokens": 1, "prompt": prompt})
}

async fn requests(http: &Client, count: usize) {
    for i in 0..count {
        let reply = http.post(COMPLETIONS, &completion(&format!("beside {i}"))).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
}

/// Clients whose requests are with the engine.
async fn clients(solo: &Solo) -> Vec<Raw2> {
    let held = solo.post.open();
    let body = completion("held").to_string();
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = Raw2::connect(solo.router.http, &[]).await;
        client.write(&frames::request(1, COMPLETIONS, body.as_bytes())).await;
        clients.push(client);
    }
    eventually("their requests are held", async || solo.post.open() == held + CONNECTIONS).await;
    clients
}

/// Sends the frames, and waits until the router has read the last of them.
async fn send_frames(client: &mut Raw2, kind: &Kind) {
    let last = frames::frame(kind::PING, 0, 0, &LAST_PING);
    let bytes = [kind.frame.repeat(kind.count), last].concat();
    assert!(client.write(&bytes).await, "{}", kind.name);
    loop {
        let frame = client.next().await.unwrap_or_else(|| panic!("{}: closed", kind.name));
        assert_ne!(frame.kind, kind::GOAWAY, "{}", kind.name);
        if frame.kind == kind::PING && frame.payload == LAST_PING {
            return;
        }
    }
}

/// Whether the answer on stream 1 comes, and is whole.
async fn is_answered(client: &mut Raw2) -> bool {
    while let Some(frame) = client.next_of(1).await {
        if frame.kind == kind::RST_STREAM {
            return false;
        }
        if frame.flags & kind::END_STREAM != 0 {
            return true;
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_within_the_budget_are_cheap_and_those_beyond_it_end_in_a_goaway() {
    let ScriptedReply::Bytes(whole) = whole_reply() else { unreachable!("a whole answer") };
    let solo = Solo::start("{}", move |heard| match heard.text().contains("held") {
        true => ScriptedReply::Held { first: Vec::new(), last: whole.clone() },
        false => ScriptedReply::Bytes(whole.clone()),
    })
    .await;
    let pid = solo.router.pid();
    requests(&solo.http, 20).await;
    let idle = processor_time(pid);
    requests(&solo.http, REQUESTS).await;
    let of_requests = processor_time(pid).saturating_sub(idle);
    let mut all = Vec::new();
    for kind in kinds() {
        let mut clients = clients(&solo).await;
        let (before, resident) = (processor_time(pid), memory(pid).now_kib);
        reset_peak(pid);
        let sending = join_all(clients.iter_mut().map(|client| send_frames(client, &kind)));
        // The clients disturb no other client.
        join(sending, requests(&solo.http, 20)).await;
        let of_frames = processor_time(pid).saturating_sub(before);
        let as_requests = 20 + CONNECTIONS * kind.count / kind.per_request;
        let allowed = of_requests.mul_f64(as_requests as f64 / REQUESTS as f64);
        let name = kind.name;
        assert!(
            of_frames <= allowed,
            "{name}: {of_frames:?}, where {as_requests} requests take {allowed:?}"
        );
        let grown_kib = memory(pid).peak_kib.saturating_sub(resident);
        assert!(grown_kib < GROWTH_KIB, "{name}: {grown_kib} KiB");
        all.push((kind, clients));
    }
    solo.post.release();
    for (kind, clients) in all {
        for (place, mut client) in clients.into_iter().enumerate() {
            assert!(is_answered(&mut client).await, "{}", kind.name);
            // Those who go on as quickly as they can have spent their budget.
            if place == 0 && kind.count < 1000 {
                let flooded = client.flood(std::iter::repeat_n(kind.frame.clone(), 20_000)).await;
                assert!(flooded.ended, "{}: {flooded:?}", kind.name);
            }
        }
    }
}
