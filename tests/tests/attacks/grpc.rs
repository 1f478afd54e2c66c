//! The gRPC listener: streams that stay open, malformed messages, deadlines.

mod parked;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use splitrail_tests::cluster::eventually;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::raw::{exchange, request};
use splitrail_tests::scripted_server::{ReceivedRequest, STREAM_HEAD, ScriptedReply};
use splitrail_tests::solo::Solo;

pub(super) const GENERATE: &str = "/splitrail.v1.FrontDoorService/Generate";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
const CHECK: &str = "/grpc.health.v1.Health/Check";
const REFLECT: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// `model: "sim", text: "a"`.
const MESSAGE: &[u8] = b"\x0a\x03sim\x12\x01a";

/// A message without any field.
const EMPTY: &[u8] = &[0, 0, 0, 0, 0];

const CHUNK: &str = "data: {\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"model\":\"sim\",\"choices\":[{\"index\":0,\"text\":\"ok\",\"finish_reason\":null}]}\n\n";

const LAST: &str = "data: {\"id\":\"x\",\"object\":\"text_completion\",\"created\":1,\"model\":\"sim\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1,\"total_tokens\":2}}\n\ndata: [DONE]\n\n";

pub(super) type Fields<'a> = &'a [(&'a str, &'a str)];
type Pieces = StreamBody<Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>>;

pub(super) const USUAL: Fields<'static> =
    &[("content-type", "application/grpc"), ("te", "trailers")];

pub(super) fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, message].concat()
}

fn engine(_: &ReceivedRequest) -> ScriptedReply {
    ScriptedReply::events(&[CHUNK, LAST].concat())
}

/// A client with one connection.
pub(super) struct Caller {
    http: Hyper<HttpConnector, Pieces>,
    address: SocketAddr,
}

/// What came of a call: the HTTP status, and the gRPC status if there is one.
pub(super) type Outcome = (u16, Option<String>);

impl Caller {
    pub(super) fn new(solo: &Solo) -> Self {
        let http =
            Hyper::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
        Self { http, address: solo.router.grpc }
    }

    /// Sends a head and a body; the body does not end if it is `open`.
    async fn begin(
        &self,
        path: &str,
        fields: Fields<'_>,
        body: &[u8],
        open: bool,
    ) -> Result<http::Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut request = http::Request::post(format!("http://{}{path}", self.address));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let pieces: Vec<Bytes> = body.chunks(16_000).map(Bytes::copy_from_slice).collect();
        let pieces = stream::iter(pieces).map(|piece| Ok(Frame::data(piece)));
        let body: Pieces = match open {
            true => StreamBody::new(Box::pin(pieces.chain(stream::pending()))),
            false => StreamBody::new(Box::pin(pieces)),
        };
        self.http.request(request.body(body).unwrap()).await
    }

    pub(super) async fn call(&self, path: &str, fields: Fields<'_>, body: &[u8]) -> Outcome {
        let whole = async { end_of(self.begin(path, fields, body, false).await.unwrap()).await };
        tokio::time::timeout(PATIENCE, whole).await.expect("an end")
    }
}

async fn end_of(reply: http::Response<Incoming>) -> Outcome {
    let http = reply.status().as_u16();
    let from_head = reply.headers().get("grpc-status").cloned();
    let body = reply.into_body().collect().await.ok();
    let from_end = body.and_then(|body| body.trailers()?.get("grpc-status").cloned());
    let status = from_head.or(from_end);
    (http, status.map(|status| status.to_str().unwrap().to_owned()))
}

/// A message whose fields are nested so deeply in one another.
fn nested(depth: usize) -> Vec<u8> {
    (0..depth).fold(Vec::new(), |inner, _| {
        let mut field = vec![0x7a];
        let mut length = inner.len();
        while length > 127 {
            field.push((length & 127 | 128) as u8);
            length >>= 7;
        }
        field.push(length as u8);
        [field, inner].concat()
    })
}

/// The usual fields and one more.
fn with<'a>(name: &'a str, value: &'a str) -> [(&'a str, &'a str); 3] {
    [USUAL[0], USUAL[1], (name, value)]
}

#[tokio::test]
async fn more_metadata_than_is_allowed_exhausts_resources() {
    let solo = Solo::start("{}", engine).await;
    let (caller, whole) = (Caller::new(&solo), framed(MESSAGE));
    let large = "v".repeat(20_000);
    let many: Vec<String> = (0..200).map(|i| format!("x-{i}")).collect();
    let many: Vec<_> = many.iter().map(|name| (&**name, "v")).collect();
    for fields in [&with("x-large", &large)[..], &[USUAL, &many].concat()] {
        for path in [GENERATE, CHECK] {
            let outcome = caller.call(path, fields, &whole).await;
            assert_eq!(outcome, (200, Some("8".into())), "{} fields", fields.len());
        }
    }
    assert_eq!(caller.call(GENERATE, USUAL, &whole).await, (200, Some("0".into())));
}

#[tokio::test]
async fn a_call_of_a_wrong_form_gets_a_status_and_reaches_no_engine() {
    let solo = Solo::start("{}", engine).await;
    let caller = Caller::new(&solo);
    let whole = framed(MESSAGE);
    assert_eq!(caller.call(GENERATE, USUAL, &whole).await, (200, Some("0".into())));
    let served = || solo.post.heard().iter().filter(|heard| heard.is_inference()).count();
    assert_eq!(served(), 1);

    let kind = |kind| [("content-type", kind), ("te", "trailers")];
    let no_call = [
        (&USUAL[1..], 415),
        (&kind("application/json")[..], 415),
        (&kind("application/grpc-web")[..], 415),
        (&kind("application/grpc+json")[..], 415),
        (&kind("application/grpcx")[..], 415),
    ];
    for (fields, status) in no_call {
        for path in [GENERATE, WATCH, REFLECT] {
            assert_eq!(caller.call(path, fields, &whole).await, (status, None), "{fields:?}");
        }
    }
    let heads = [
        (&USUAL[..1], "13"),
        (&with("grpc-encoding", "gzip")[..], "12"),
        (
            &[&with("grpc-encoding", "identity")[..], &[("grpc-encoding", "gzip")]].concat()[..],
            "12",
        ),
        (&with("grpc-timeout", "99999999999H")[..], "3"),
        (&with("grpc-timeout", "-1S")[..], "3"),
        (&with("grpc-timeout", "soon")[..], "3"),
        (&with("grpc-timeout", "0n")[..], "4"),
        (&with("x-splitrail-flow", "evil")[..], "3"),
    ];
    for (fields, status) in heads {
        let outcome = caller.call(GENERATE, fields, &whole).await;
        assert_eq!(outcome, (200, Some(status.into())), "{fields:?}");
    }
    let flagged = |flag: u8| [&[flag][..], &whole[1..]].concat();
    let long = |bytes: u32| [&[0][..], &bytes.to_be_bytes(), MESSAGE].concat();
    let bodies = [
        ("no message", Vec::new()),
        ("a part of a prefix", vec![0; 4]),
        ("two messages", [&whole[..], &whole[..]].concat()),
        ("a message and a part", [&whole[..], &[0]].concat()),
        ("a compressed message", flagged(1)),
        ("an unknown flag", flagged(2)),
        ("a message that is cut", long(MESSAGE.len() as u32 + 5)),
        ("text that is not UTF-8", framed(b"\x0a\x03sim\x12\x01\xff")),
        ("an unknown wire type", framed(b"\x0f\x01\x01")),
        ("a number of 11 bytes", framed(&[&[8][..], &[0xff; 11]].concat())),
        ("groups that never end", framed(&[MESSAGE, &[0x7b; 10_000]].concat())),
    ];
    for (what, body) in bodies {
        let outcome = caller.call(GENERATE, USUAL, &body).await;
        assert_eq!(outcome, (200, Some("13".into())), "{what}");
    }
    for bytes in [u32::MAX, (32 << 20) + 1] {
        assert_eq!(caller.call(GENERATE, USUAL, &long(bytes)).await.1.as_deref(), Some("11"));
    }
    let raw = request("POST", GENERATE, USUAL, &whole);
    assert_eq!(exchange(solo.router.grpc, &raw).await.unwrap().status(), 505, "HTTP/1.1");
    assert_eq!(served(), 1, "no engine was asked");

    // Fields that are not known, however deep, are skipped.
    let deep = framed(&[MESSAGE, &nested(100)].concat());
    assert_eq!(caller.call(GENERATE, USUAL, &deep).await, (200, Some("0".into())));
}

#[tokio::test]
async fn a_deadline_ends_a_call_and_its_work_at_the_engine() {
    let head = |_: &ReceivedRequest| ScriptedReply::Held { first: Vec::new(), last: Vec::new() };
    let within = |_: &ReceivedRequest| ScriptedReply::Held {
        first: [STREAM_HEAD, CHUNK.as_bytes()].concat(),
        last: Vec::new(),
    };
    let scripts: [fn(&ReceivedRequest) -> ScriptedReply; 2] = [head, within];
    for script in scripts {
        let solo = Solo::start("{}", script).await;
        let fields = [USUAL[0], USUAL[1], ("grpc-timeout", "300m")];
        let outcome = Caller::new(&solo).call(GENERATE, &fields, &framed(MESSAGE)).await;
        assert_eq!(outcome, (200, Some("4".into())));
        eventually("the engine's work has ended", async || solo.post.open() == 0).await;
        assert_eq!(solo.metric("splitrail_requests_in_flight", &[]).await, 0.0);
    }
    let solo = Solo::start("{}", engine).await;
    for timeout in ["1H", "99999999H"] {
        let fields = [USUAL[0], USUAL[1], ("grpc-timeout", timeout)];
        let outcome = Caller::new(&solo).call(GENERATE, &fields, &framed(MESSAGE)).await;
        assert_eq!(outcome, (200, Some("0".into())), "{timeout}");
    }
    let fields = [USUAL[0], USUAL[1], ("grpc-timeout", "200m")];
    let watch = Caller::new(&solo).call(WATCH, &fields, EMPTY).await;
    assert_eq!(watch, (200, Some("4".into())), "a watch as well");
}

/// Opens a watch; keeps it, unless it is refused.
async fn open_watch(caller: &Caller) -> Option<http::Response<Incoming>> {
    let mut reply = caller.begin(WATCH, USUAL, EMPTY, false).await.unwrap();
    match reply.headers().get("grpc-status") {
        None => {
            reply.body_mut().frame().await.unwrap().unwrap();
            Some(reply)
        }
        Some(status) => {
            assert_eq!(status, "8", "RESOURCE_EXHAUSTED");
            None
        }
    }
}

#[tokio::test]
async fn watches_are_bounded_and_connections_with_no_other_use_do_not_shut_others_out() {
    let limits = "{ connections_max: 40, grpc_watches_max: 9, idle_timeout: 2s }";
    let solo = Solo::start(limits, engine).await;
    let callers: Vec<Caller> = (0..30).map(|_| Caller::new(&solo)).collect();
    let mut watches = Vec::new();
    for caller in &callers {
        watches.extend(open_watch(caller).await);
    }
    assert!((1..=9).contains(&watches.len()), "{} watches", watches.len());
    let one = &callers[0];
    for _ in 0..20 {
        assert!(open_watch(one).await.is_none(), "no more on one connection either");
    }
    assert!(solo.metric("splitrail_shed_total", &[("reason", "grpc_watches")]).await >= 41.0);
    let open = watches.len() as f64;
    eventually("the other connections are closed", async || {
        let labels = [("listener", "grpc")];
        solo.metric("splitrail_connections", &labels).await <= open + 1.0
    })
    .await;
    let check = Caller::new(&solo).call(CHECK, USUAL, EMPTY).await;
    assert_eq!(check, (200, Some("0".into())), "another client is served");
    // What is given back serves others.
    drop((watches, callers));
    let caller = Caller::new(&solo);
    eventually("there is room again", async || open_watch(&caller).await.is_some()).await;
}

#[tokio::test]
async fn calls_of_the_library_that_say_nothing_are_ended() {
    let solo = Solo::start("{ body_grace: 200ms }", engine).await;
    let caller = Caller::new(&solo);
    // Neither a part of a message nor nothing at all keeps them open.
    for (path, body) in [(REFLECT, &[][..]), (REFLECT, &[0, 0]), (WATCH, &[0, 0]), (CHECK, &[])] {
        let silent = async {
            // A reset is an end as well.
            if let Ok(reply) = caller.begin(path, USUAL, body, true).await {
                drop(end_of(reply).await);
            }
        };
        let ended = tokio::time::timeout(PATIENCE, silent).await;
        assert!(ended.is_ok(), "{path} stays open");
    }
}

#[tokio::test]
async fn calls_of_the_library_that_say_nothing_are_bounded() {
    let solo = Solo::start("{ body_grace: 600s, grpc_watches_max: 90 }", engine).await;
    let caller = Caller::new(&solo);
    let calls = (0..200).map(|_| caller.begin(REFLECT, USUAL, &[], true));
    let mut calls: FuturesUnordered<_> = calls.collect();
    // An accepted call may have no reply as long as it stays open.
    let (mut open, mut refused) = (Vec::new(), 0);
    while refused < 110 {
        let reply = tokio::time::timeout(PATIENCE, calls.next()).await;
        let reply = reply.unwrap_or_else(|_| panic!("{refused} of 200 were refused"));
        let reply = reply.expect("a reply").unwrap();
        match reply.headers().get("grpc-status") {
            Some(status) => {
                assert_eq!(status, "8", "RESOURCE_EXHAUSTED");
                refused += 1;
            }
            None => open.push(reply),
        }
    }
    assert!(open.len() <= 90, "{} are open", open.len());
}

#[tokio::test]
async fn a_deadline_ends_the_work_of_a_call_whose_client_takes_nothing() {
    let solo = Solo::start("{ write_stall: 600s, reply_rate_min: 0B/s }", |_| {
        let first = [STREAM_HEAD, CHUNK.as_bytes()].concat();
        ScriptedReply::Held { first, last: Vec::new() }
    })
    .await;
    let mut client = Raw2::connect(solo.router.grpc, &frames::initial_window(0)).await;
    // Of the static table: POST is 3, the scheme http 6.
    let mut block = vec![0x83, 0x86];
    let fields = [(":path", GENERATE), (":authority", "x"), ("grpc-timeout", "2S")];
    for (name, value) in fields.iter().chain(USUAL) {
        block.extend(frames::field(name, value));
    }
    client.write(&frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &block)).await;
    client.write(&frames::frame(kind::DATA, kind::END_STREAM, 1, &framed(MESSAGE))).await;
    eventually("the engine works", async || solo.post.open() == 1).await;
    eventually("the engine's work has ended", async || solo.post.open() == 0).await;
    assert_eq!(solo.metric("splitrail_requests_in_flight", &[]).await, 0.0);
}
