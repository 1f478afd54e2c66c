//! Replies whose framing is broken or ambiguous: a typed error or the right reply, and the next
//! request on that worker gets its own reply.

use splitrail_tests::front::Front;
use splitrail_tests::raw_engine::{RawEngine, Then, Turn};

use super::{ask, generated, is_answered, no_echo};

/// What a client may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Safe {
    /// The answer.
    Answer,
    /// A 502.
    Refused,
    /// Either.
    Both,
}
use Safe::{Answer, Both, Refused};

const JSON: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";

/// What an engine writes, and whether it hangs up then.
struct Shape {
    name: String,
    bytes: Vec<u8>,
    then: fn() -> Then,
    safe: Safe,
}

fn wait() -> Then {
    Then::Wait
}

fn close() -> Then {
    Then::Close
}

fn reset() -> Then {
    Then::Reset
}

#[derive(Default)]
struct Table(Vec<Shape>);

impl Table {
    fn add(&mut self, safe: Safe, name: &str, bytes: impl Into<Vec<u8>>) {
        let (name, bytes) = (name.to_owned(), bytes.into());
        self.0.push(Shape { name, bytes, then: wait, safe });
    }

    fn add_last(&mut self, safe: Safe, name: &str, bytes: impl Into<Vec<u8>>) {
        self.add(safe, name, bytes);
        self.0.last_mut().unwrap().then = close;
    }
}

/// The answer, and one that must reach no client.
fn bodies() -> (String, String) {
    (generated("cmpl-1", "right"), generated("cmpl-2", "EVIL"))
}

fn evil() -> String {
    let (_, evil) = bodies();
    format!("{JSON}content-length: {}\r\n\r\n{evil}", evil.len())
}

/// Two ways to say where a body ends.
fn lengths(table: &mut Table) {
    let ((body, _), evil) = (bodies(), evil());
    let length = body.len();
    let framed = |fields: &str| format!("{JSON}{fields}\r\n\r\n{body}");
    let one = format!("content-length: {length}");
    table.add(Answer, "a length", framed(&one));
    table.add(Answer, "a length twice", framed(&format!("{one}\r\n{one}")));
    table.add(Refused, "two lengths", framed(&format!("{one}\r\ncontent-length: 5")) + &evil);
    table.add(Refused, "a list of one length", framed(&format!("{one}, {length}")));
    table.add(Refused, "a list of two lengths", framed(&format!("content-length: 5, {length}")));
    table.add(Refused, "a length with a sign", framed(&format!("content-length: +{length}")));
    table.add(Refused, "a length of 2^64", framed("content-length: 18446744073709551616"));
    table.add(Answer, "more than its length", framed(&one) + &evil);
    table.add(Answer, "one byte more than its length", framed(&one) + "x");
    let short = framed(&format!("content-length: {}", length + 9));
    table.add_last(Refused, "less than its length", short);
    table.add(
        Refused,
        "a 204 with a body",
        format!("HTTP/1.1 204 No\r\n{one}\r\n\r\n{body}{evil}"),
    );
    table.add(
        Refused,
        "a 304 with a body",
        format!("HTTP/1.1 304 No\r\n{one}\r\n\r\n{body}{evil}"),
    );
    let old = framed(&format!("connection: keep-alive\r\n{one}")).replace("1.1", "1.0");
    table.add(Answer, "HTTP/1.0 that is kept", old);
    table.add_last(Answer, "until the end", framed("x: y"));
    table.add_last(Answer, "HTTP/1.0 until the end", framed("x: y").replace("1.1", "1.0"));
}

fn codings(table: &mut Table) {
    let ((body, _), evil) = (bodies(), evil());
    let size = format!("{:x}", body.len());
    let chunks = |size: &str, end: &str| format!("{size}\r\n{body}\r\n0\r\n{end}\r\n");
    let coded = |coding: &str| format!("{JSON}transfer-encoding: {coding}\r\n\r\n");
    let chunked = |size: &str, end: &str| coded("chunked") + &chunks(size, end);
    table.add(Answer, "chunks", chunked(&size, ""));
    let both = format!("{JSON}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n");
    table.add(Both, "a length and chunks", both + &chunks(&size, "") + &evil);
    let twice = format!("{JSON}transfer-encoding: chunked\r\n{}", &coded("chunked")[JSON.len()..]);
    table.add(Refused, "chunked twice", twice + &chunks(&size, ""));
    table.add(Refused, "chunked in chunked", coded("chunked, chunked") + &chunks(&size, ""));
    table.add(Refused, "compressed chunks", coded("gzip, chunked") + &chunks(&size, ""));
    // As long as the engine keeps the connection open, nothing ended this once.
    let identity = format!("identity\r\ncontent-length: {}", body.len());
    table.add(Refused, "no coding", coded(&identity) + &body + &evil);
    table.add(Refused, "an unknown coding", coded("br") + &body);
    table.add(Answer, "an extension", chunked(&format!("{size};a=b"), ""));
    table.add(Answer, "a trailer", chunked(&size, "x: y\r\n"));
    for (name, size) in [("2^64", "10000000000000000"), ("-1", "-1"), ("0x", "0x5"), ("none", "")] {
        table.add(Refused, &format!("a chunk of {name}"), chunked(size, ""));
    }
    let long = format!("{size};{}", "x".repeat(8193));
    table.add(Refused, "an extension of 8193 bytes", chunked(&long, ""));
    let trailers = format!("x: {}\r\n", "a".repeat(9000));
    table.add(Refused, "9000 bytes of trailers", chunked(&size, &trailers));
    let bare = format!("{}{size}\n{body}\n0\n\n", coded("chunked"));
    table.add(Refused, "chunks with bare line ends", bare);
    table.add(Both, "a compressed body", framed_as(&body, "content-encoding: gzip\r\n"));
}

fn framed_as(body: &str, fields: &str) -> String {
    format!("{JSON}{fields}content-length: {}\r\n\r\n{body}", body.len())
}

fn heads(table: &mut Table) {
    let ((body, _), evil) = (bodies(), evil());
    let good = framed_as(&body, "");
    let early = "HTTP/1.1 103 Early\r\nlink: x\r\n\r\n";
    table.add(Answer, "an early hint", format!("{early}{good}"));
    let interim = "HTTP/1.1 100 Continue\r\n\r\n".repeat(10_000);
    table.add(Refused, "ten thousand interim responses", interim + &good);
    let switch = "HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n";
    table.add(Refused, "another protocol", switch.to_owned() + &evil);
    let long = format!("x: {}\r\n", "a".repeat(33_000));
    table.add(Refused, "a head of 33 kB", framed_as(&body, &long));
    let many: String = (0..101).map(|at| format!("x{at}: 1\r\n")).collect();
    table.add(Refused, "101 fields", framed_as(&body, &many));
    for status in ["000", "999", "20", "abc"] {
        table.add(Refused, &format!("status {status}"), good.replace("200", status));
    }
    table.add(Refused, "HTTP/2", good.replace("HTTP/1.1", "HTTP/2"));
    table.add(Refused, "a TLS alert", b"\x15\x03\x01\x00\x02\x02\x16".to_vec());
    table.add(Refused, "noise", (0..300_u32).map(|at| (at * 151) as u8).collect::<Vec<_>>());
    table.add_last(Refused, "another first line", format!("ICY 200 OK\r\n\r\n{body}"));
    table.add(Refused, "a NUL in a field", framed_as(&body, "x: a\0b\r\n"));
    table.add(Both, "bare line ends", good.replace("\r\n", "\n"));
    table.add(Both, "a folded field", framed_as(&body, "x: a\r\n b\r\n"));
    for at in 1..JSON.len() {
        table.add_last(Refused, &format!("the end after {at} bytes"), &good[..at]);
    }
}

fn bodies_and_ends(table: &mut Table) {
    let (body, _) = bodies();
    for status in ["302 Found", "307 Temporary", "308 Permanent"] {
        let to = "location: http://127.0.0.1:1/evil\r\ncontent-length: 0";
        table.add(Refused, status, format!("HTTP/1.1 {status}\r\n{to}\r\n\r\n"));
    }
    for (name, body) in [
        ("a web page", "<html>EVIL</html>"),
        ("nothing", ""),
        ("a list", "[]"),
        ("NaN", r#"{"usage": NaN}"#),
    ] {
        table.add(Refused, name, framed_as(body, ""));
    }
    let nonsense = r#"{"prompt_tokens":-5,"completion_tokens":1e308,"total_tokens":"x"}"#;
    let usage = body.find("\"usage\":").unwrap() + "\"usage\":".len();
    let usage = format!("{}{nonsense}}}", &body[..usage]);
    table.add(Both, "usage that is none", framed_as(&usage, ""));
    table.add(Answer, "two answers", framed_as(&body, "") + &evil());
    table.add_last(Refused, "the end at once", "");
    table.add(Refused, "a reset", "");
    table.0.last_mut().unwrap().then = reset;
}

#[tokio::test]
async fn an_answer_of_broken_framing_is_refused_and_the_next_request_gets_its_own() {
    let mut table = Table::default();
    for rows in [lengths, codings, heads, bodies_and_ends] {
        rows(&mut table);
    }
    let table = std::sync::Arc::new(table);
    let shapes = std::sync::Arc::clone(&table);
    let engine = RawEngine::start(move |asked| {
        let text = asked.heard.text();
        let row = text.split("row-").nth(1).and_then(|rest| rest.split('.').next()?.parse().ok());
        match row.map(|row: usize| &shapes.0[row]) {
            Some(shape) => Turn { bytes: shape.bytes.clone(), then: (shape.then)() },
            None => Turn::answer(no_echo(&asked.heard)),
        }
    })
    .await;
    let front = Front::start("{}", "breaker: { failures: 0 }", &[engine.url()]).await;
    for (row, shape) in table.0.iter().enumerate() {
        let reply = ask(&front, &format!("row-{row}.")).await;
        let (status, text, name) = (reply.status.as_u16(), reply.text(), &shape.name);
        match status {
            200 => assert!(shape.safe != Refused && text.contains("right"), "{name}: {text}"),
            502 => assert!(shape.safe != Answer, "{name}: {text}"),
            _ => panic!("{name}: {status} {text}"),
        }
        assert!(!text.contains("EVIL"), "{name}: {text}");
        for next in 0..3 {
            is_answered(&front, &format!("next-{row}-{next}")).await;
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_called_that() {
    for (bytes, said) in [
        ("SSH-2.0-OpenSSH_9.9\r\n", "not HTTP"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n", "transfer coding"),
        ("HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "content-length"),
        ("HTTP/1.1 200 OK\r\ncontent-le", "closed the connection before it answered"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "in mid-reply"),
    ] {
        let engine = RawEngine::start(move |_| Turn::last(bytes)).await;
        let front = Front::start("{}", "", &[engine.url()]).await;
        let reply = ask(&front, "x").await;
        assert_eq!(reply.status, 502, "{bytes}");
        assert!(reply.text().contains(said), "{bytes}: {}", reply.text());
    }
}
