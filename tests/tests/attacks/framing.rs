//! Requests whose end can be read in two ways, each with another request behind it on the same
//! connection: the engine sees exactly what was sent, or nothing at all.

use serde_json::{Value, json};
use splitrail_tests::raw::exchange;
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const FIRST_LINE: &str = "POST /v1/completions HTTP/1.1";
const TYPE: &str = "content-type: application/json\r\n";
const CHUNKED: &str = "transfer-encoding: chunked\r\n";

/// What may become of a request and of the one behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// A 4xx or no answer, and the end of the connection.
    Refused,
    /// Both are served.
    Served,
    /// The first is served, and the connection ends.
    ServedAlone,
    /// Refused, or both served: either reading is the only one.
    RefusedOrServed,
}
use Fate::{Refused, RefusedOrServed, Served, ServedAlone};

/// Makes the bytes that stand for a body of this text.
type MakeBody = fn(&str) -> Vec<u8>;

/// A request with this first line and these fields, and bytes that stand for its body.
struct Shape {
    what: String,
    fate: Fate,
    first_line: String,
    fields: Vec<u8>,
    body: MakeBody,
}

fn plain(text: &str) -> Vec<u8> {
    text.into()
}

fn nothing(_: &str) -> Vec<u8> {
    Vec::new()
}

fn in_one_chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len()).into()
}

/// A shape with the usual first line.
fn shape(fate: Fate, fields: impl Into<Vec<u8>>, body: MakeBody) -> Shape {
    let fields = fields.into();
    let what = String::from_utf8_lossy(&fields).chars().take(60).collect();
    Shape { what, fate, first_line: FIRST_LINE.into(), fields, body }
}

fn line(fate: Fate, first_line: &str) -> Shape {
    let what = first_line.chars().take(60).collect();
    let (fields, first_line) = ("content-length: LEN\r\n".into(), first_line.to_owned());
    Shape { what, fate, first_line, fields, body: plain }
}

/// `LEN` stands for the body's length.
fn lengths() -> Vec<Shape> {
    let refused = [
        "content-length: LEN\r\ncontent-length:LEN\r\n",
        "content-length: LEN\r\ncontent-length: 2\r\n",
        "content-length: LEN, LEN\r\n",
        "content-length: LEN\r\n\tx: y\r\n",
        "content-length : LEN\r\n",
        "content-length: 0xLEN\r\n",
        "content-length: LEN_\r\n",
        "content-length: +LEN\r\n",
        "content-length: -1\r\n",
        "content-length: 18446744073709551616\r\n",
        "content-length: 340282366920938463463374607431768211456\r\n",
        "content-length: \r\n",
        "content-length: LEN;\r\n",
        "content-length: LEN LEN\r\n",
        "content-length: LEN\x0b\r\n",
        "x: y\ncontent-length: LEN\r\n",
        "x: a\0b\r\ncontent-length: LEN\r\n",
        "x: a\rb\r\ncontent-length: LEN\r\n",
        "x\0y: 1\r\ncontent-length: LEN\r\n",
        "x\x7fy: 1\r\ncontent-length: LEN\r\n",
        "xé: 1\r\ncontent-length: LEN\r\n",
        ": a\r\ncontent-length: LEN\r\n",
        "garbage\r\ncontent-length: LEN\r\n",
        " x: y\r\ncontent-length: LEN\r\n",
    ];
    let mut shapes: Vec<Shape> =
        refused.into_iter().map(|fields| shape(Refused, fields, plain)).collect();
    shapes.push(shape(Refused, &b"content-length: \xa0LEN\r\n"[..], plain));
    shapes.push(shape(Served, "content-length: LEN\r\n", plain));
    shapes.push(shape(RefusedOrServed, "content-length: 00LEN\r\n", plain));
    shapes.push(shape(Served, "Content-Length:\tLEN \r\n", plain));
    shapes.push(shape(Served, "expect: 100-continue\r\ncontent-length: LEN\r\n", plain));
    shapes.push(shape(RefusedOrServed, "expect: 200-ok\r\ncontent-length: LEN\r\n", plain));
    let upgrade = "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n\
                   http2-settings: AAMAAABkAAQAAP__\r\ncontent-length: LEN\r\n";
    shapes.push(shape(ServedAlone, upgrade, plain));
    shapes
}

fn codings() -> Vec<Shape> {
    let refused = [
        "transfer-encoding:\x0bchunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: identity, chunked\r\n",
        "transfer-encoding: chunked, chunked\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: \"chunked\"\r\n",
        "transfer-encoding: chunked;q=1\r\n",
        "transfer-encoding : chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        "content-length: LEN\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding:\r\n chunked\r\n",
    ];
    let mut shapes: Vec<Shape> =
        refused.into_iter().map(|fields| shape(Refused, fields, in_one_chunk)).collect();
    for fields in [
        "transfer-encoding: identity\r\ncontent-length: LEN\r\n",
        "transfer-encoding: \r\ncontent-length: LEN\r\n",
    ] {
        shapes.push(shape(Refused, fields, plain));
    }
    shapes.push(shape(Served, "Transfer-Encoding: Chunked\r\n", in_one_chunk));
    shapes.push(shape(RefusedOrServed, "transfer-encoding: Chunked \r\n", in_one_chunk));
    let old = Shape {
        first_line: FIRST_LINE.replace("1.1", "1.0"),
        ..shape(Refused, format!("connection: keep-alive\r\n{CHUNKED}"), in_one_chunk)
    };
    shapes.push(old);
    shapes
}

fn sizes() -> Vec<Shape> {
    // `N` is the size of the only chunk.
    fn chunk(text: &str, size: &str) -> Vec<u8> {
        let size = size.replace('N', &format!("{:x}", text.len()));
        format!("{size}\r\n{text}\r\n0\r\n\r\n").into()
    }
    let bodies: [(Fate, MakeBody); 27] = [
        (Refused, |text| chunk(text, "N ")),
        (Refused, |text| chunk(text, " N")),
        (Refused, |text| chunk(text, "N\t")),
        (Refused, |text| chunk(text, "+N")),
        (Refused, |text| chunk(text, "-N")),
        (Refused, |text| chunk(text, "0xN")),
        (Refused, |text| chunk(text, "N;x")),
        (Refused, |text| chunk(text, "N;x=y")),
        (Refused, |text| chunk(text, "N;x=\"\n\"")),
        (Refused, |text| chunk(text, "\nN")),
        (Refused, |text| chunk(text, "N\r")),
        (Refused, |text| chunk(text, "")),
        (Refused, |text| chunk(text, "g")),
        (Refused, |text| chunk(text, "ffffffffffffffff")),
        (Refused, |text| chunk(text, "10000000000000000")),
        (Refused, |text| chunk(text, "00000000000000N")),
        (Served, |text| chunk(text, "0N")),
        (Served, |text| {
            let (start, end) = text.split_at(3);
            format!("3\r\n{start}\r\n{:X}\r\n{end}\r\n0\r\n\r\n", end.len()).into()
        }),
        (Refused, |text| format!("{:x}\n{text}\n0\n\n", text.len()).into()),
        (Refused, |text| format!("{:x}\r\n{text}\n0\r\n\r\n", text.len()).into()),
        (Refused, |text| format!("{:x}\r\n{text}XX0\r\n\r\n", text.len()).into()),
        (Refused, |text| format!("{:x}\r\n{text}\r\n0\r\n\n", text.len()).into()),
        (Served, |text| format!("{:x}\r\n{text}\r\n0\r\nx: y\r\n\r\n", text.len()).into()),
        (RefusedOrServed, |text| {
            format!("{:x}\r\n{text}\r\n0\r\ncontent-length: 9\r\n\r\n", text.len()).into()
        }),
        (RefusedOrServed, |text| {
            format!("{:x}\r\n{text}\r\n0\r\n{CHUNKED}\r\n", text.len()).into()
        }),
        (RefusedOrServed, |text| {
            let long = "a".repeat(15_000);
            format!("{:x}\r\n{text}\r\n0\r\nx: {long}\r\n\r\n", text.len()).into()
        }),
        (RefusedOrServed, |text| {
            let long = "a".repeat(17_000);
            format!("{:x}\r\n{text}\r\n0\r\nx: {long}\r\n\r\n", text.len()).into()
        }),
    ];
    let shapes = bodies.into_iter().map(|(fate, body)| Shape {
        what: String::from_utf8_lossy(&body("TEXT")).chars().take(60).collect(),
        ..shape(fate, CHUNKED, body)
    });
    shapes.collect()
}

fn heads() -> Vec<Shape> {
    let many: String = (0..101).map(|i| format!("x{i}: 1\r\n")).collect();
    let long = format!("x: {}\r\n", "a".repeat(17_000));
    let length = "content-length: LEN\r\n";
    vec![
        shape(Refused, format!("{many}{length}"), plain),
        shape(Refused, format!("{long}{length}"), plain),
        line(Refused, "POST /v1/completions\r HTTP/1.1"),
        line(Refused, "POST\t/v1/completions HTTP/1.1"),
        line(Refused, "POST /v1/completions HTTP/1.2"),
        line(Refused, "POST /v1/completions HTTP/2.0"),
        line(Refused, "POST /v1/completions"),
        line(Refused, " POST /v1/completions HTTP/1.1"),
        line(Refused, "\r\n\r\n\r\nPOST /v1/completions HTTP/1.1"),
        line(Served, "\r\nPOST /v1/completions HTTP/1.1"),
        line(ServedAlone, "POST /v1/completions HTTP/1.0"),
        line(RefusedOrServed, "POST http://elsewhere/v1/completions HTTP/1.1"),
        Shape {
            body: nothing,
            fields: Vec::new(),
            ..line(Refused, &format!("POST /{} HTTP/1.1", "a".repeat(1_000_000)))
        },
        Shape {
            body: nothing,
            fields: Vec::new(),
            ..line(ServedAlone, "CONNECT 169.254.169.254:80 HTTP/1.1")
        },
    ]
}

fn completion(prompt: &str) -> String {
    json!({"model": "sim", "max_tokens": 1, "prompt": prompt}).to_string()
}

fn second(prompt: &str) -> Vec<u8> {
    let body = completion(prompt);
    let fields =
        format!("host: x\r\n{TYPE}connection: close\r\ncontent-length: {}\r\n", body.len());
    format!("{FIRST_LINE}\r\n{fields}\r\n{body}").into()
}

impl Shape {
    fn bytes(&self, prompt: &str) -> Vec<u8> {
        let body = completion(prompt);
        let mut bytes = format!("{}\r\nhost: x\r\n{TYPE}", self.first_line).into_bytes();
        let length = body.len().to_string();
        let mut rest = &self.fields[..];
        while let Some(at) = rest.windows(3).position(|three| three == b"LEN") {
            bytes.extend_from_slice(&rest[..at]);
            bytes.extend_from_slice(length.as_bytes());
            rest = &rest[at + 3..];
        }
        bytes.extend_from_slice(rest);
        bytes.extend_from_slice(b"\r\n");
        bytes.extend((self.body)(&body));
        bytes
    }
}

fn prompts(solo: &Solo) -> Vec<String> {
    let heard = solo.post.heard().into_iter().filter(|heard| heard.is_inference());
    heard
        .map(|heard| {
            let body: Value = serde_json::from_slice(&heard.body).unwrap();
            body["prompt"].as_str().unwrap_or_default().to_owned()
        })
        .collect()
}

#[tokio::test]
async fn bytes_after_an_ambiguous_request_reach_no_engine() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let shapes = [lengths(), codings(), sizes(), heads()];
    let shapes: Vec<Shape> = shapes.into_iter().flatten().collect();
    assert!(shapes.len() > 80, "{}", shapes.len());
    let mut expected = Vec::new();
    for (number, shape) in shapes.iter().enumerate() {
        let Shape { what, fate, .. } = shape;
        let names = [format!("first {number}"), format!("second {number}")];
        let bytes = [shape.bytes(&names[0]), second(&names[1])].concat();
        let reply = exchange(solo.router.http, &bytes).await;
        let refused = reply.as_ref().is_none_or(|reply| (400..500).contains(&reply.status()));
        let fate = match fate {
            RefusedOrServed if refused => Refused,
            RefusedOrServed => Served,
            fate => *fate,
        };
        let is_connect = what.starts_with("CONNECT");
        match fate {
            Served => expected.extend(names),
            ServedAlone if !is_connect => expected.push(names[0].clone()),
            _ => {}
        }
        assert_eq!(refused, fate == Refused || is_connect, "{what:?}: {reply:?}");
        assert_eq!(prompts(&solo), expected, "{what:?}: {reply:?}");
    }
}

#[tokio::test]
async fn a_request_is_the_same_wherever_its_bytes_are_cut() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let length = shape(Served, "connection: close\r\ncontent-length: LEN\r\n", plain);
    let chunked = shape(Served, format!("connection: close\r\n{CHUNKED}"), in_one_chunk);
    let mut sent = 0;
    for shape in [length, chunked] {
        let bytes = shape.bytes("cut");
        for cut in 1..bytes.len() {
            assert_eq!(
                in_pieces(&solo, [&bytes[..cut], &bytes[cut..]]).await,
                "200",
                "cut at {cut}"
            );
            sent += 1;
        }
        assert_eq!(in_pieces(&solo, bytes.chunks(1)).await, "200", "byte by byte");
        sent += 1;
    }
    assert_eq!(prompts(&solo), vec!["cut"; sent]);
}

/// Sends pieces as packets of their own; the status that comes back.
async fn in_pieces<'a>(solo: &Solo, pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut socket = TcpStream::connect(solo.router.http).await.unwrap();
    socket.set_nodelay(true).unwrap();
    for piece in pieces {
        socket.write_all(piece).await.unwrap();
        // The router, another process, may read what there is before there is more.
        tokio::task::yield_now().await;
    }
    let mut reply = Vec::new();
    socket.read_to_end(&mut reply).await.unwrap();
    String::from_utf8_lossy(&reply).split(' ').nth(1).unwrap_or_default().to_owned()
}
