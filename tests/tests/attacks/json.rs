//! Bodies: differences between JSON parsers, and Unicode.
//!
//! An engine parses the body once more, in Python. What the router lets through must read alike
//! in every parser; what can be read in two ways is refused.

use std::sync::{Arc, Mutex};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use splitrail_tests::json_reader::Json;
use splitrail_tests::solo::{Solo, whole_reply};

/// Members that would steer an engine, or a hand-off between engines.
const FORBIDDEN: [&str; 12] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "conversation_params",
    "request_id",
    "rid",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_room",
    "bootstrap_port",
];

/// Members in which engines look for further ones.
const CARRIERS: [&str; 5] =
    ["sampling_params", "vllm_xargs", "extra_args", "extra_body", "custom_params"];

/// Members that engines are sent as they are.
const PASSED: [&str; 2] = ["response_format", "structured_outputs"];

/// The members that make a request of a body.
const BASE: &str = r#""model":"sim","prompt":"p","max_tokens":1"#;

const RANDOM_BODIES: usize = 1500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Pass,
    Fail,
    Either,
}
use Expected::{Either, Fail, Pass};

/// Bodies, with what must become of them. `%` stands for the usual members.
#[allow(clippy::too_many_lines)] // One table of cases.
fn fixed() -> Vec<(Expected, Vec<u8>)> {
    let refused = [
        r#"{%,"x":01}"#,
        r#"{%,"x":+1}"#,
        r#"{%,"x":.5}"#,
        r#"{%,"x":5.}"#,
        r#"{%,"x":1e}"#,
        r#"{%,"x":NaN}"#,
        r#"{%,"x":Infinity}"#,
        r#"{%,"x":-Infinity}"#,
        r#"{%,"x":0x1}"#,
        r#"{%,"x":"\ud800"}"#,
        r#"{%,"x":"\udc00\ud800"}"#,
        r#"{%,"x":"\ud800\u0041"}"#,
        "{%,\"x\":\"\u{1}\"}",
        "{%,\"x\":\"a\nb\"}",
        r#"{%,"x":"\x41"}"#,
        r#"{%,"x":"\u00"}"#,
        r#"{%,"x":"\u{41}"}"#,
        r#"{%,"\ud800":1}"#,
        "{%,'x':1}",
        "{%,x:1}",
        "{%,}",
        r#"{%,"x":[1,]}"#,
        r#"{%,,"x":1}"#,
        "{%}x",
        "{%}{}",
        "\u{feff}{%}",
        "{%,\u{a0}\"x\":1}",
        "{%,\u{b}\"x\":1}",
        "{%,\u{c}\"x\":1}",
        "{%,\u{2028}\"x\":1}",
        r#"{%,/*c*/"x":1}"#,
        "{%}//c",
        r#"{%,"x":tru}"#,
        r#"{%,"x":True}"#,
        r#"{%,"model":"sim"}"#,
        r#"{%,"\u006dodel":"sim"}"#,
        r#"{%,"x":{"a":1,"a":2}}"#,
        r#"{%,"x":{"a":1,"\u0061":2}}"#,
        r#"{%,"x":[{"y":{"a":1,"a":2}}]}"#,
        r#"{%,"x":{"😀":1,"\ud83d\ude00":2}}"#,
        "[{%}]",
        "\"x\"",
        "",
        "{",
        "null",
        "{%",
        "%",
    ];
    let served = [
        r#"{%,"x":-0}"#,
        r#"{%,"x":1E5}"#,
        r#"{%,"x":"\ud83d\ude00"}"#,
        r#"{%,"x":"\/"}"#,
        "{%,\"x\":\"\u{7f}\"}",
        "{%} \n\t ",
        "\r\n {%}",
        r#"{%,"prompt ":"q"}"#,
        r#"{%,"PROMPT":"q"}"#,
        r#"{%,"":1}"#,
        r#"{%,"x":"\u0022\u005c"}"#,
    ];
    let either = [r#"{%,"x":1e308}"#, r#"{%,"x":1e309}"#, r#"{%,"x":"\u0000"}"#];
    let mut bodies: Vec<(Expected, String)> = Vec::new();
    bodies.extend(refused.map(|body| (Fail, body.to_owned())));
    bodies.extend(served.map(|body| (Pass, body.to_owned())));
    bodies.extend(either.map(|body| (Either, body.to_owned())));
    bodies.push((Either, format!("{{%,\"x\":{}}}", "9".repeat(400))));
    for depth in [99, 100, 126, 127, 128, 129, 200, 100_000] {
        bodies.push((Either, format!("{{%,\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth))));
        let (open, close) = ("{\"a\":".repeat(depth), "}".repeat(depth));
        bodies.push((Either, format!("{{%,\"x\":{open}1{close}}}")));
    }
    bodies.extend(steering());
    // Past the number of members up to which they are compared one with the other.
    let many: String = (0..70).map(|i| format!("\"k{i}\":0,")).collect();
    bodies.push((Pass, format!("{{{many}%,\"kv_transfer_params\":1}}")));
    bodies.push((Pass, format!("{{\"kv_transfer_params\":1,{many}%}}")));
    bodies.push((Fail, format!("{{%,{many}\"k69\":1}}")));
    bodies.push((Fail, format!("{{%,{many}\"\\u006b5\":1}}")));
    let text = |(must, body): (Expected, String)| (must, body.replacen('%', BASE, 1).into_bytes());
    let mut bodies: Vec<_> = bodies.into_iter().map(text).collect();
    for not_utf8 in [&b"\xff"[..], b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe2\x82"] {
        let body = [b"{\"model\":\"sim\",\"prompt\":\"", not_utf8, b"\"}"].concat();
        bodies.push((Fail, body));
    }
    let utf16 = format!("{{{BASE}}}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    bodies.push((Fail, utf16));
    bodies
}

/// Members that steer an engine, written in every way and place.
fn steering() -> Vec<(Expected, String)> {
    let escaped = |name: &str| -> String {
        name.chars().map(|letter| format!("\\u{:04X}", letter as u32)).collect()
    };
    let mut bodies = Vec::new();
    for name in FORBIDDEN {
        bodies.push((Either, format!("{{%,\"{name}\":{{\"do_remote_prefill\":true}}}}")));
        bodies.push((Either, format!("{{%,\"{}\":1}}", escaped(name))));
        bodies.push((Fail, format!("{{\"{name}\":1,%,\"{name}\":2}}")));
        bodies.push((Fail, format!("{{\"{name}\":1,%,\"{}\":2}}", escaped(name))));
    }
    for carrier in CARRIERS {
        for name in ["kv_transfer_params", "bootstrap_room", "rid"] {
            let member = format!("\"{name}\":{{\"do_remote_prefill\":true}}");
            for depth in 1..=6 {
                let (open, close) = (format!("\"{carrier}\":{{").repeat(depth), "}".repeat(depth));
                bodies.push((Either, format!("{{%,{open}{member}{close}}}")));
            }
            let hidden = format!("\"{}\":1,\"z\":1", escaped(name));
            bodies.push((Either, format!("{{%,\"{carrier}\":{{{hidden}}}}}")));
            bodies.push((Either, format!("{{%,\"{carrier}\":[{{{member}}}]}}")));
            bodies.push((Either, format!("{{%,\"{carrier}\":{{\"a\":[[{{{member}}}]]}}}}")));
            bodies.push((Either, format!("{{%,\"{carrier}\":{}}}", Value::from(&*member))));
            bodies.push((Either, format!("{{%,\"{}\":{{{member}}}}}", escaped(carrier))));
        }
    }
    bodies
}

/// Any body at all, most of them JSON.
struct Maker(StdRng);

impl Maker {
    fn name(&mut self) -> String {
        let names: Vec<&str> = [&FORBIDDEN[..], &CARRIERS, &PASSED, &["x", "é"]].concat();
        let name = *names.choose(&mut self.0).unwrap();
        let letters = name.chars().map(|letter| match self.0.random_range(0..5) {
            0 => format!("\\u{:04x}", letter as u32),
            1 => format!("\\u{:04X}", letter as u32),
            _ => letter.to_string(),
        });
        letters.collect()
    }

    fn value(&mut self, depth: usize) -> String {
        let leaves = [
            "1",
            "-0.0",
            "12345678901",
            "1e5",
            "true",
            "null",
            "\"s\"",
            "\"\\u00e9\\n\"",
            "[]",
            "{}",
            "\"kv_transfer_params\"",
            "\"\\ud83d\\ude00\"",
        ];
        match self.0.random_range(0..10) {
            _ if depth == 0 => (*leaves.choose(&mut self.0).unwrap()).to_owned(),
            0..3 => (*leaves.choose(&mut self.0).unwrap()).to_owned(),
            3..5 => {
                let items = self.0.random_range(0..4);
                let items: Vec<_> = (0..items).map(|_| self.value(depth - 1)).collect();
                format!("[{}]", items.join(","))
            }
            _ => {
                let members = self.0.random_range(0..5);
                let members: Vec<_> = (0..members).map(|_| self.member(depth - 1)).collect();
                format!("{{{}}}", members.join(","))
            }
        }
    }

    fn member(&mut self, depth: usize) -> String {
        let colon = *[":", " : ", ":\n\t"].choose(&mut self.0).unwrap();
        format!("\"{}\"{colon}{}", self.name(), self.value(depth))
    }

    fn body(&mut self) -> String {
        let mut members: Vec<String> = BASE.split(',').map(str::to_owned).collect();
        for _ in 0..self.0.random_range(0..6) {
            let depth = self.0.random_range(0..6);
            let at = self.0.random_range(0..=members.len());
            let member = self.member(depth);
            members.insert(at, member);
        }
        let mut body =
            format!("{{{}}}", members.join(*[",", " , ", ",\r\n"].choose(&mut self.0).unwrap()));
        if self.0.random_bool(0.15) {
            let places: Vec<usize> = body.char_indices().map(|(at, _)| at).collect();
            let at = *places.choose(&mut self.0).unwrap();
            let odd = ["", ",", "\"", "\\", "}", "\0", " ", "\u{a0}", "e", "[", "\t"];
            let odd = odd.choose(&mut self.0).unwrap();
            match self.0.random_bool(0.5) {
                true => body.insert_str(at, odd),
                false => {
                    let rest = body.split_off(at);
                    body = body + odd + &rest.chars().skip(1).collect::<String>();
                }
            }
        }
        body
    }
}

/// The forbidden members of a body where engines look for them.
fn forbidden(body: &Json, found: &mut Vec<String>) {
    for (name, value) in body.members() {
        if FORBIDDEN.contains(&name.as_str()) {
            found.push(name.clone());
        }
        if CARRIERS.contains(&name.as_str()) {
            within_carrier(value, found);
        }
    }
}

/// The same of a value within a carrier, however deep.
fn within_carrier(value: &Json, found: &mut Vec<String>) {
    if let Json::Array(items) = value {
        items.iter().for_each(|item| within_carrier(item, found));
    }
    for (name, value) in value.members() {
        if FORBIDDEN.contains(&name.as_str()) {
            found.push(name.clone());
        }
        within_carrier(value, found);
    }
}

/// Whether `serde_json` reads the same.
fn same(ours: &Json, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Json::Null, Value::Null) => true,
        (Json::Bool(ours), Value::Bool(theirs)) => ours == theirs,
        (Json::Number(ours), Value::Number(theirs)) => {
            let ours: f64 = ours.parse().unwrap();
            theirs.as_f64() == Some(ours)
        }
        (Json::Text(ours), Value::String(theirs)) => ours == theirs,
        (Json::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| same(a, b))
        }
        (Json::Object(ours), Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours.iter().all(|(name, a)| theirs.get(name).is_some_and(|b| same(a, b)))
        }
        _ => false,
    }
}

#[tokio::test]
async fn every_parser_reads_the_same_in_a_body_that_reaches_an_engine() {
    let at_engine: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
    let last = Arc::clone(&at_engine);
    let solo = Solo::start("{}", move |heard| {
        *last.lock().unwrap() = Some(heard.body.clone());
        whole_reply()
    })
    .await;
    let mut maker = Maker(StdRng::seed_from_u64(22));
    let random = (0..RANDOM_BODIES).map(|_| (Either, maker.body().into_bytes()));
    let (mut served, mut refused) = (0, 0);
    for (must, body) in fixed().into_iter().chain(random) {
        let shown: String = String::from_utf8_lossy(&body).chars().take(300).collect();
        let headers = [("content-type", "application/json")];
        let reply = solo.http.post_with("/v1/completions", &headers, body.clone()).await;
        let heard = at_engine.lock().unwrap().take();
        let status = reply.status.as_u16();
        let sent = Json::read(&body);
        match must {
            Pass => assert_eq!(status, 200, "{shown}: {}", reply.text()),
            Fail => assert_eq!(status, 400, "{shown}"),
            Either if sent.is_none() => assert_eq!(status, 400, "{shown}"),
            // 404: another model's name.
            Either => assert!(matches!(status, 200 | 400 | 404), "{shown}: {status}"),
        }
        assert_eq!(heard.is_some(), status == 200, "{shown}: {status}");
        let Some(heard) = heard else {
            refused += 1;
            continue;
        };
        served += 1;
        check(&heard, &sent.unwrap(), &shown);
    }
    assert!(served > 300 && refused > 300, "{served} served, {refused} refused");
}

/// What an engine was sent is what every parser reads, without what steers it, and otherwise what
/// the client sent.
fn check(heard: &[u8], sent: &Json, shown: &str) {
    let text = String::from_utf8_lossy(heard);
    let read = Json::read(heard).unwrap_or_else(|| panic!("{shown} became {text}"));
    let other: Value = serde_json::from_slice(heard).unwrap();
    assert!(same(&read, &other), "{shown} became {text}");
    let mut found = Vec::new();
    forbidden(&read, &mut found);
    assert!(found.is_empty(), "{shown} became {text}: {found:?}");
    assert_eq!(read.get("prompt"), sent.get("prompt"), "{shown} became {text}");
    for name in PASSED {
        assert_eq!(read.get(name), sent.get(name), "{shown} became {text}");
    }
}
