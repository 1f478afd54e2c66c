//! A client that leaves, at each phase of its request: engines stop working on it,
//! nothing stays booked, and it is counted as cancelled.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, SHORT_LEASE, Trial, chat, completion, prompt,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// The client closes its socket.
    Close,
    /// Its connection is reset, as by a process that is killed with bytes unread.
    Reset,
}

const WAYS: [Leaving; 2] = [Leaving::Close, Leaving::Reset];

/// A client that can leave: its bare connection.
struct Visitor(TcpStream);

impl Visitor {
    /// Connects and sends a request, which is to be counted as cancelled.
    async fn send(trial: &mut Trial, path: &str, id: &str, body: &Value) -> Self {
        trial.expect("cancelled");
        let address = trial.cluster.running.addresses.http;
        let mut socket = TcpStream::connect(address).await.unwrap();
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
             x-request-id: {id}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        Self(socket)
    }

    /// Reads until so many events have come.
    async fn events(&mut self, wanted: usize) {
        let mut seen = Vec::new();
        let mut piece = [0; 4096];
        while String::from_utf8_lossy(&seen).matches("data: ").count() < wanted {
            let read = self.0.read(&mut piece).await.unwrap();
            assert!(read > 0, "ended early: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&piece[..read]);
        }
    }

    fn leave(self, way: Leaving) {
        if matches!(way, Leaving::Reset) {
            self.0.set_zero_linger().unwrap();
        }
    }
}

/// One worker per leg; times as of the phase in question.
fn one_each(engine: fn(&str, &mut SimConfig)) -> Spec {
    Spec { prefill: 1, decode: 1, engine, ..Spec::default() }
}

/// No step of the prefill engine ends within a test.
fn slow_prefill(name: &str, config: &mut SimConfig) {
    if name.starts_with('p') {
        config.decode_us_per_step = 600_000_000;
    }
}

/// No step of the decode engine ends within a test.
fn slow_decode(name: &str, config: &mut SimConfig) {
    if name.starts_with('d') {
        config.decode_us_per_step = 600_000_000;
    }
}

/// Both endpoints, streamed and not.
fn requests(salt: &str) -> Vec<(&'static str, Value)> {
    let mut requests = Vec::new();
    for stream in [false, true] {
        for (path, mut body) in [
            (CHAT, chat(&prompt(40, &format!("{salt}{stream}")))),
            (COMPLETIONS, completion(&prompt(40, &format!("{salt}{stream}")))),
        ] {
            body["max_tokens"] = 2000.into();
            body["stream"] = stream.into();
            requests.push((path, body));
        }
    }
    requests
}

/// The record of a request that has gone says so.
async fn is_recorded(trial: &Trial, id: &str) {
    for decision in trial.cluster.decisions(id).await {
        assert_eq!(decision["outcome"], "cancelled", "{decision}");
    }
}

/// The next client is served as if nothing had been.
async fn the_next_is_served(trial: &mut Trial) {
    let reference = Reference::start().await;
    let mut body = completion(&prompt(3, "next"));
    body["max_tokens"] = 2.into();
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
}

#[tokio::test]
async fn leaving_while_prefill_runs_stops_it() {
    for (turn, (path, body)) in requests("prefill").into_iter().enumerate() {
        let mut trial = Trial::start(one_each(slow_prefill)).await;
        let visitor = Visitor::send(&mut trial, path, "prefill", &body).await;
        trial.until_running("p0").await;
        visitor.leave(WAYS[turn % 2]);
        trial.check().await;
        let state = trial.cluster.engine("p0").state();
        assert_eq!(state.totals.aborted, 1, "the engine was told");
        assert_eq!((state.staged_hand_offs, state.blocks_used), (0, 0));
        assert_eq!(trial.asked("d0").len(), 0, "decode was never asked");
        trial.finish().await;
    }
}

#[tokio::test]
async fn leaving_while_a_batch_is_prefilled_stops_every_prompt_of_it() {
    for (way, stream) in WAYS.into_iter().zip([false, true]) {
        let mut trial = Trial::start(one_each(slow_prefill)).await;
        let body = batch("early", stream);
        let visitor = Visitor::send(&mut trial, COMPLETIONS, "early", &body).await;
        eventually("all four are at the prefill engine", async || {
            let state = trial.cluster.engine("p0").state();
            state.running + state.waiting == 4
        })
        .await;
        visitor.leave(way);
        trial.check().await;
        assert_eq!(trial.asked("d0").len(), 0, "decode was never asked");
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_request_left_while_prefill_runs_is_recorded_as_cancelled() {
    for body in [completion(&prompt(40, "record")), batch("record", false)] {
        let mut trial = Trial::start(one_each(slow_prefill)).await;
        let visitor = Visitor::send(&mut trial, COMPLETIONS, "record", &body).await;
        trial.until_running("p0").await;
        visitor.leave(Leaving::Close);
        trial.check().await;
        is_recorded(&trial, "record").await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn leaving_while_an_engine_queues_the_request_removes_it_from_the_queue() {
    let mut trial = Trial::start(one_each(|name, config| {
        slow_prefill(name, config);
        config.max_num_seqs = 1;
    }))
    .await;
    let first = Visitor::send(&mut trial, CHAT, "first", &chat(&prompt(40, "first"))).await;
    trial.until_running("p0").await;
    let second = Visitor::send(&mut trial, CHAT, "second", &chat(&prompt(40, "second"))).await;
    eventually("the second one waits", async || trial.cluster.engine("p0").state().waiting == 1)
        .await;
    second.leave(Leaving::Close);
    eventually("the second one waits no more", async || {
        trial.cluster.engine("p0").state().waiting == 0
    })
    .await;
    assert_eq!(trial.cluster.engine("p0").state().running, 1, "the first one goes on");
    first.leave(Leaving::Close);
    trial.finish().await;
}

#[tokio::test]
async fn leaving_before_the_first_token_stops_decode_and_frees_what_prefill_kept() {
    for (turn, (path, body)) in requests("first").into_iter().enumerate() {
        let mut trial = Trial::start(one_each(slow_decode)).await;
        let visitor = Visitor::send(&mut trial, path, "first", &body).await;
        trial.until_running("d0").await;
        visitor.leave(WAYS[turn % 2]);
        trial.check().await;
        let state = trial.cluster.engine("d0").state();
        assert_eq!(state.totals.aborted, 1, "the engine was told");
        trial.staged_blocks_are_freed().await;
        is_recorded(&trial, "first").await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn blocks_of_a_client_that_left_are_freed_by_their_lease_at_the_latest() {
    let mut trial = Trial::start(one_each(|_, config| {
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    }))
    .await;
    for (turn, (path, body)) in requests("lease").into_iter().enumerate() {
        // Decode has the hand-off and does not fetch yet.
        trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 60_000 }, Some(1));
        let id = format!("lease-{turn}");
        let visitor = Visitor::send(&mut trial, path, &id, &body).await;
        eventually("decode is asked", async || trial.asked("d0").len() == turn + 1).await;
        visitor.leave(WAYS[turn % 2]);
        trial.check().await;
        is_recorded(&trial, &id).await;
    }
    trial.staged_blocks_are_freed().await;
    the_next_is_served(&mut trial).await;
    trial.finish().await;
}

fn batch(salt: &str, stream: bool) -> Value {
    let prompts: Vec<String> = (0..4).map(|i| prompt(30, &format!("{salt}{i}-"))).collect();
    let mut body = completion("");
    body["prompt"] = json!(prompts);
    body["max_tokens"] = 2000.into();
    body["stream"] = stream.into();
    body
}

#[tokio::test]
async fn leaving_during_a_batch_stops_every_prompt_of_it() {
    for stream in [false, true] {
        let mut trial = Trial::start(one_each(|name, config| {
            if name == "d0" {
                config.decode_us_per_step = 20_000;
            }
        }))
        .await;
        for (turn, way) in WAYS.into_iter().enumerate() {
            let body = batch(&format!("batch{turn}"), stream);
            let id = format!("batch-{turn}");
            let mut visitor = Visitor::send(&mut trial, COMPLETIONS, &id, &body).await;
            if stream {
                visitor.events(5).await;
            }
            eventually("all four are generated", async || {
                trial.cluster.engine("d0").state().running == 4
            })
            .await;
            visitor.leave(way);
            trial.check().await;
            let aborted = trial.cluster.engine("d0").state().totals.aborted;
            assert_eq!(aborted, 4 * (turn as u64 + 1), "the engine was told of each");
            assert_eq!(trial.cluster.decisions(&id).await.len(), 4);
            is_recorded(&trial, &id).await;
        }
        trial.staged_blocks_are_freed().await;
        the_next_is_served(&mut trial).await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn leaving_an_aggregated_request_stops_it() {
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let mut trial = Trial::start(spec).await;
    for (turn, (path, body)) in requests("agg").into_iter().enumerate() {
        let id = format!("agg-{turn}");
        let visitor = Visitor::send(&mut trial, path, &id, &body).await;
        trial.until_running("w0").await;
        visitor.leave(WAYS[turn % 2]);
        trial.check().await;
        let state = trial.cluster.engine("w0").state();
        assert_eq!(state.totals.aborted, turn as u64 + 1, "the engine was told");
        assert_eq!(state.blocks_used, 0);
        is_recorded(&trial, &id).await;
    }
    the_next_is_served(&mut trial).await;
    trial.finish().await;
}
