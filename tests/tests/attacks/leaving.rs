//! Clients of HTTP/2 and gRPC that leave at each phase of a request, by a reset of the stream and
//! by the end of the connection. `tests/tests/clients/disconnect.rs` has the same for HTTP/1.1.

use prost::Message as _;
use serde_json::json;
use splitrail_sim::SimConfig;
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::grpc::text_request;
use splitrail_tests::trial::{COMPLETIONS, Trial, prompt};

const GENERATE: &str = "/splitrail.v1.FrontDoorService/Generate";
const CANCEL: [u8; 4] = [0, 0, 0, 8];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Http2,
    Grpc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// The stream is reset, and its connection stays.
    Reset,
    /// The connection is closed.
    Close,
}

const WAYS: [(Protocol, Leaving); 4] = [
    (Protocol::Http2, Leaving::Reset),
    (Protocol::Http2, Leaving::Close),
    (Protocol::Grpc, Leaving::Reset),
    (Protocol::Grpc, Leaving::Close),
];

/// A client with one request on stream 1.
struct Visitor(Raw2);

impl Visitor {
    /// Sends a request's head, and this share of its body.
    async fn begin(trial: &Trial, protocol: Protocol, salt: &str, share: f64) -> Self {
        let text = prompt(40, salt);
        let addresses = trial.cluster.running.addresses();
        let (address, path, content_type, body) = match protocol {
            Protocol::Http2 => {
                let body =
                    json!({"model": "sim", "max_tokens": 2000, "stream": true, "prompt": text});
                let body = body.to_string().into_bytes();
                (addresses.http, COMPLETIONS, "application/json", body)
            }
            Protocol::Grpc => {
                let mut request = text_request(&text, "");
                request.sampling.as_mut().unwrap().max_tokens = Some(2000);
                let message = request.encode_to_vec();
                let length = u32::try_from(message.len()).unwrap().to_be_bytes();
                let body = [&[0], &length[..], &message].concat();
                (addresses.grpc.unwrap(), GENERATE, "application/grpc", body)
            }
        };
        // Of the static table: POST is 3, the scheme http 6.
        let mut head = vec![0x83, 0x86];
        for (name, value) in [
            (":path", path),
            (":authority", "x"),
            ("content-type", content_type),
            ("te", "trailers"),
        ] {
            head.extend(frames::field(name, value));
        }
        let mut client = Raw2::connect(address, &[]).await;
        client.write(&frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &head)).await;
        let sent = &body[..(body.len() as f64 * share) as usize];
        let flags = if sent.len() == body.len() { kind::END_STREAM } else { 0 };
        client.write(&frames::frame(kind::DATA, flags, 1, sent)).await;
        Self(client)
    }

    async fn first_event(&mut self) {
        loop {
            let frame = self.0.next_of(1).await.expect("an event");
            if frame.kind == kind::DATA && !frame.payload.is_empty() {
                return;
            }
        }
    }

    /// Leaves; what is given back must be kept until the books are checked.
    async fn leave(mut self, way: Leaving) -> Option<Self> {
        match way {
            Leaving::Reset => {
                self.0.write(&frames::frame(kind::RST_STREAM, 0, 1, &CANCEL)).await;
                Some(self)
            }
            Leaving::Close => None,
        }
    }
}

fn one_each(engine: fn(&str, &mut SimConfig)) -> Spec {
    Spec { prefill: 1, decode: 1, engine, ..Spec::default() }
}

async fn nothing_is_left(trial: &Trial) {
    trial.cluster.quiet().await;
    trial.nothing_is_held().await;
    trial.staged_blocks_are_freed().await;
}

#[tokio::test]
async fn leaving_while_the_body_is_sent_asks_no_engine() {
    let trial = Trial::start(one_each(|_, _| {})).await;
    for (protocol, way) in WAYS {
        for share in [0.0, 0.5] {
            let visitor = Visitor::begin(&trial, protocol, "body", share).await;
            let _stays = visitor.leave(way).await;
            nothing_is_left(&trial).await;
        }
    }
    assert_eq!(trial.counts(["p0", "d0"]), [0, 0]);
}

#[tokio::test]
async fn leaving_while_prefill_runs_ends_it() {
    for (protocol, way) in WAYS {
        // No step of the prefill engine ends within the test.
        let trial = Trial::start(one_each(|name, config| {
            if name == "p0" {
                config.decode_us_per_step = 600_000_000;
            }
        }))
        .await;
        let visitor = Visitor::begin(&trial, protocol, "prefill", 1.0).await;
        trial.until_running("p0").await;
        let _stays = visitor.leave(way).await;
        nothing_is_left(&trial).await;
        assert_eq!(trial.cluster.engine("p0").state().totals.aborted, 1, "{protocol:?} {way:?}");
        assert!(trial.asked("d0").is_empty(), "decode was never asked");
    }
}

#[tokio::test]
async fn leaving_before_the_first_token_ends_decode_and_frees_what_prefill_staged() {
    for (protocol, way) in WAYS {
        // No step of the decode engine ends within the test.
        let trial = Trial::start(one_each(|name, config| {
            if name == "d0" {
                config.decode_us_per_step = 600_000_000;
            }
        }))
        .await;
        let visitor = Visitor::begin(&trial, protocol, "decode", 1.0).await;
        trial.until_running("d0").await;
        let _stays = visitor.leave(way).await;
        nothing_is_left(&trial).await;
        assert_eq!(trial.cluster.engine("d0").state().totals.aborted, 1, "{protocol:?} {way:?}");
    }
}

#[tokio::test]
async fn leaving_in_mid_stream_ends_decode() {
    let trial = Trial::start(one_each(|name, config| {
        if name == "d0" {
            config.decode_us_per_step = 10_000;
        }
    }))
    .await;
    for (turn, (protocol, way)) in (1..).zip(WAYS) {
        let mut visitor = Visitor::begin(&trial, protocol, &format!("stream{turn}"), 1.0).await;
        visitor.first_event().await;
        let _stays = visitor.leave(way).await;
        nothing_is_left(&trial).await;
        assert_eq!(trial.cluster.engine("d0").state().totals.aborted, turn, "{protocol:?} {way:?}");
    }
    let cancelled = [("outcome", "cancelled")];
    eventually("each is counted as cancelled", async || {
        trial.cluster.metric("splitrail_requests_total", &cancelled).await == WAYS.len() as f64
    })
    .await;
}
