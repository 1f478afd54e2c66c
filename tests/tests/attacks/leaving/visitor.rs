//! Clients that begin a request, and leave in one of the ways that there are.

use prost::Message as _;
use serde_json::json;
use splitrail_proto::v1;
use splitrail_tests::frames::{self, Raw2, kind};
use splitrail_tests::grpc::text_request;
use splitrail_tests::trial::{CHAT, COMPLETIONS, Trial};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const GENERATE: &str = "/splitrail.v1.FrontDoorService/Generate";
const CANCEL: [u8; 4] = [0, 0, 0, 8];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
    Grpc,
}
use Protocol::{Grpc, Http1, Http2};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// The client's side of the connection ends with a FIN.
    Finish,
    /// The connection ends with a RST, as that of a process that is killed with bytes unread.
    Reset,
    /// The stream is reset, and its connection stays.
    CancelStream,
}
use Leaving::{CancelStream, Finish, Reset};

/// Each protocol with each way of leaving that it has.
pub(super) const WAYS: [(Protocol, Leaving); 8] = [
    (Http1, Finish),
    (Http1, Reset),
    (Http2, Finish),
    (Http2, Reset),
    (Http2, CancelStream),
    (Grpc, Finish),
    (Grpc, Reset),
    (Grpc, CancelStream),
];

/// What is asked for.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    /// The continuation of a text.
    Completion(String),
    /// The answer to this many messages, each with this text.
    Chat(usize, String),
}

impl Ask {
    /// The path and the body over HTTP, streamed.
    fn http(&self) -> (&'static str, Vec<u8>) {
        let (path, body) = match self {
            Self::Completion(text) => (COMPLETIONS, json!({"prompt": text})),
            Self::Chat(count, text) => {
                let message = json!({"role": "user", "content": text});
                (CHAT, json!({"messages": vec![message; *count]}))
            }
        };
        let mut body = body;
        for (name, value) in
            [("model", json!("sim")), ("max_tokens", json!(2000)), ("stream", json!(true))]
        {
            body[name] = value;
        }
        (path, body.to_string().into_bytes())
    }

    /// The message of a call, after its length.
    fn grpc(&self) -> Vec<u8> {
        let mut request = text_request("", "");
        request.sampling.as_mut().unwrap().max_tokens = Some(2000);
        request.prompt = Some(match self {
            Self::Completion(text) => v1::generate_request::Prompt::Text(text.clone()),
            Self::Chat(count, text) => {
                let message = v1::ChatMessage {
                    role: "user".into(),
                    content: text.clone(),
                    ..Default::default()
                };
                v1::generate_request::Prompt::Chat(v1::Chat { messages: vec![message; *count] })
            }
        });
        let message = request.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], &message].concat()
    }
}

/// A client with one request on a connection of its own.
pub(super) enum Visitor {
    OverHttp1(TcpStream),
    /// Over HTTP/2, on stream 1; whether it is a call of gRPC.
    OverHttp2(Raw2, bool),
}

impl Visitor {
    /// Sends a request's head, and this share of its body.
    pub(super) async fn begin(trial: &Trial, protocol: Protocol, ask: &Ask, share: f64) -> Self {
        let addresses = trial.cluster.running.addresses;
        let (address, is_call) = match protocol {
            Grpc => (addresses.grpc.unwrap(), true),
            Http1 | Http2 => (addresses.http, false),
        };
        let (path, body) = if is_call { (GENERATE, ask.grpc()) } else { ask.http() };
        let sent = &body[..(body.len() as f64 * share) as usize];
        let mut socket = TcpStream::connect(address).await.unwrap();
        if protocol == Http1 {
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n",
                body.len()
            );
            socket.write_all(&[head.as_bytes(), sent].concat()).await.unwrap();
            return Self::OverHttp1(socket);
        }
        let mut head = match is_call {
            false => frames::post(path),
            true => call_head(),
        };
        head = frames::frame(kind::HEADERS, kind::END_HEADERS, 1, &head);
        // A frame carries up to 16 KiB, and a stream up to 64 KiB before the router says so.
        let pieces: Vec<&[u8]> = sent.chunks(16_000).collect();
        for (place, piece) in pieces.iter().enumerate() {
            let is_last = place + 1 == pieces.len() && sent.len() == body.len();
            let flags = if is_last { kind::END_STREAM } else { 0 };
            head.extend(frames::frame(kind::DATA, flags, 1, piece));
        }
        let mut client = Raw2::over(socket, &[]).await;
        client.write(&head).await;
        Self::OverHttp2(client, is_call)
    }

    /// Reads until so many events with tokens have come.
    pub(super) async fn events(&mut self, wanted: usize) {
        match self {
            Self::OverHttp1(socket) => {
                let mut seen = Vec::new();
                let mut piece = [0; 4096];
                while String::from_utf8_lossy(&seen).matches("data: ").count() < wanted {
                    let read = socket.read(&mut piece).await.unwrap();
                    assert!(read > 0, "ended early: {}", String::from_utf8_lossy(&seen));
                    seen.extend_from_slice(&piece[..read]);
                }
            }
            Self::OverHttp2(client, is_call) => {
                // The first message of a call says that it was started.
                let wanted = wanted + usize::from(*is_call);
                let mut seen = 0;
                while seen < wanted {
                    let frame = client.next_of(1).await.expect("an event");
                    assert_eq!(frame.flags & kind::END_STREAM, 0, "ended early: {frame:?}");
                    seen += usize::from(frame.kind == kind::DATA && !frame.payload.is_empty());
                }
            }
        }
    }

    /// Leaves. What is given back must be kept until the books are checked: it is the direction of
    /// the connection in which the router sends, or the connection of a stream that was reset.
    pub(super) async fn leave(self, way: Leaving) -> Option<Self> {
        match (self, way) {
            (Self::OverHttp1(mut socket), Finish) => {
                socket.shutdown().await.unwrap();
                Some(Self::OverHttp1(socket))
            }
            (Self::OverHttp1(socket), Reset) => {
                socket.set_zero_linger().unwrap();
                None
            }
            (Self::OverHttp2(mut client, is_call), Finish) => {
                client.finish().await;
                Some(Self::OverHttp2(client, is_call))
            }
            (Self::OverHttp2(client, _), Reset) => {
                client.reset();
                None
            }
            (Self::OverHttp2(mut client, is_call), CancelStream) => {
                client.write(&frames::frame(kind::RST_STREAM, 0, 1, &CANCEL)).await;
                Some(Self::OverHttp2(client, is_call))
            }
            (Self::OverHttp1(_), CancelStream) => unreachable!("HTTP/1.1 has no streams"),
        }
    }
}

/// The header block of a call.
fn call_head() -> Vec<u8> {
    // Of the static table: POST is 3, the scheme http 6.
    let mut head = vec![0x83, 0x86];
    for (name, value) in [
        (":path", GENERATE),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        head.extend(frames::field(name, value));
    }
    head
}
