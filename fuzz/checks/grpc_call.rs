//! The body of a gRPC call of `Generate`: messages with their prefixes, and the request that the
//! first of them is. The first byte chooses where the rest is cut into pieces.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::Request;
use hyper::body::{Body, Frame};
use prost::Message as _;
use splitrail_proto::v1::GenerateRequest;
use splitrail_router::assemble::assemble;
use splitrail_router::core::Core;
use splitrail_router::ingress::grpc::refusal;

const BODY_MAX_BYTES: usize = 4096;

/// Status codes of gRPC.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const OUT_OF_RANGE: i32 = 11;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;

pub(crate) fn check(data: &[u8]) {
    let [cuts, stream @ ..] = data else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let status = |pieces: Vec<&[u8]>| runtime.as_ref().expect("a runtime").block_on(call(pieces));
    let whole = status(vec![stream]);
    let length = usize::from(*cuts % 61) + 2;
    assert_eq!(status(stream.chunks(1).collect()), whole, "cut after each byte");
    assert_eq!(status(stream.chunks(length).collect()), whole, "cut each {length} bytes");
    match framed(stream) {
        Framed::One(message) => match GenerateRequest::decode(message) {
            Err(_) => assert_eq!(whole, Some(INTERNAL), "no message"),
            // There is no such model, or no worker of it is there.
            Ok(request) => {
                let allowed = [INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE];
                assert!(
                    whole.is_some_and(|status| allowed.contains(&status)),
                    "{whole:?} {request:?}"
                );
            }
        },
        Framed::TooLong => assert!(matches!(whole, Some(OUT_OF_RANGE | INTERNAL)), "{whole:?}"),
        Framed::Broken => assert!(whole.is_some(), "served"),
        // A call has one message.
        Framed::Several => assert!(whole.is_some(), "served without a worker"),
    }
}

/// What the prefixes say, read a second time.
enum Framed<'s> {
    One(&'s [u8]),
    Several,
    TooLong,
    Broken,
}

fn framed(stream: &[u8]) -> Framed<'_> {
    let Some(([flag, length @ ..], rest)) = stream.split_first_chunk::<5>() else {
        return Framed::Broken;
    };
    let length = u32::from_be_bytes(*length) as usize;
    match (flag, rest.len()) {
        (1.., _) => Framed::Broken,
        _ if length > BODY_MAX_BYTES => Framed::TooLong,
        (0, there) if there == length => Framed::One(rest),
        (0, there) if there < length => Framed::Broken,
        (0, _) => Framed::Several,
    }
}

/// The status of a call with this body. It cannot succeed: there is no engine.
async fn call(pieces: Vec<&[u8]>) -> Option<i32> {
    let pieces = pieces.into_iter().map(Bytes::copy_from_slice).collect();
    let request = Request::post("/splitrail.v1.FrontDoorService/Generate")
        .version(hyper::Version::HTTP_2)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Pieces(pieces));
    refusal(core(), request.expect("a request")).await
}

/// A router with one model, and nobody who serves it.
fn core() -> &'static Arc<Core> {
    static CORE: OnceLock<Arc<Core>> = OnceLock::new();
    CORE.get_or_init(|| {
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ body_size_max: {BODY_MAX_BYTES} }}
models:
  - name: m
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    workers: [ {{ id: w0, role: both, url: \"http://127.0.0.1:1\" }} ]
"
        );
        let loaded = splitrail_config::parse("splitrail.yaml", &yaml, Path::new(""));
        let loaded = loaded.unwrap_or_else(|problems| panic!("{problems}"));
        assemble(loaded.config, None).expect("a core")
    })
}

/// A body in memory, piece by piece.
struct Pieces(VecDeque<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }
}
