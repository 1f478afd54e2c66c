//! Replies of engines from which more memory would be made than they have bytes, and events that
//! another parser reads as several.

use serde_json::{Value, json};
use splitrail_tests::front::Front;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};

use super::{COMPLETIONS, completion, generated, prompt_of};

/// How far the router's memory may grow.
const GROWN_MAX_KIB: u64 = 150 << 10;

const EMBEDDINGS: &str = "/v1/embeddings";

/// A list of small numbers.
fn list(bytes: usize) -> String {
    format!("[{}0]", "0,".repeat(bytes / 2))
}

/// Members of an object, each with a comma before it.
fn members(bytes: usize) -> String {
    (0..bytes / 12).map(|at| format!(",\"{at:07}\":0")).collect()
}

fn streamed(prompt: impl Into<Value>) -> Value {
    json!({
        "model": "sim", "prompt": prompt.into(), "max_tokens": 2, "stream": true,
        "stream_options": {"include_usage": true},
    })
}

async fn engine(
    answer: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
) -> ScriptedServer {
    ScriptedServer::start(move |heard| match heard.is_inference() {
        true => answer(heard),
        false => ScriptedReply::json(200, "{}"),
    })
    .await
}

/// The client's reply to a request, whose memory the router must not multiply.
async fn little_is_made_of(front: &Front, what: &str, body: &Value) -> (u16, String) {
    let before = memory(front.router.pid());
    reset_peak(front.router.pid());
    let reply = front.http.post(COMPLETIONS, body).await;
    let grown_kib = memory(front.router.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < GROWN_MAX_KIB, "{what}: {grown_kib} KiB");
    (reply.status.as_u16(), reply.text())
}

#[tokio::test]
async fn a_long_error_event_is_no_refusal_and_costs_little_memory() {
    const EVENT_BYTES: usize = 32 << 20;
    let error = r#"{"code":400,"message":"m","param":"p"}"#;
    let long = format!("data: {{\"error\":{error},\"x\":{}}}\n\n", list(EVENT_BYTES));
    let short = format!("data: {{\"error\":{error}}}\n\n");
    let engine = engine(move |heard| match &*prompt_of(heard) {
        "long" => ScriptedReply::events(&long),
        _ => ScriptedReply::events(&short),
    })
    .await;
    let front = Front::measured("{}", "retries: { decode: 0 }", &[engine.url()]).await;
    let (status, text) = little_is_made_of(&front, "an error event", &streamed("long")).await;
    assert_eq!(status, 502, "{text}");
    let (status, text) = little_is_made_of(&front, "a short one", &streamed("short")).await;
    assert_eq!(status, 400, "a refusal is passed on: {text}");
}

/// Words of an engine about itself.
const INNER: &str = "inner http://10.0.0.1:8000";

#[tokio::test]
async fn an_engine_s_words_reach_clients_only_with_refusals_that_say_what_to_change() {
    const STATUSES: [u16; 10] = [400, 413, 422, 404, 409, 451, 500, 502, 401, 403];
    let error = |code: u16| {
        json!({"error": {"message": INNER, "param": INNER, "code": code, "type": "x"}}).to_string()
    };
    let engine = engine(move |heard| {
        let prompt = match heard.target.as_str() {
            COMPLETIONS => prompt_of(heard),
            _ => serde_json::from_str::<Value>(&heard.text()).unwrap()["input"].to_string(),
        };
        let mut words = prompt.trim_matches('"').split(' ');
        let (kind, code) = (words.next().unwrap(), words.next().unwrap().parse().unwrap());
        match kind {
            "status" => ScriptedReply::json(code, &error(code)),
            "whole" => ScriptedReply::json(200, &error(code)),
            _ => ScriptedReply::events(&format!("data: {}\n\n", error(code))),
        }
    })
    .await;
    let front = Front::measured("{}", "retries: { decode: 0 }", &[engine.url()]).await;
    for code in STATUSES {
        let asked = |kind| json!(format!("{kind} {code}"));
        let plain = |kind| json!({"model": "sim", "prompt": asked(kind), "max_tokens": 2});
        let embeddings = |kind| json!({"model": "sim", "input": asked(kind)});
        for (what, path, body) in [
            ("status", COMPLETIONS, plain("status")),
            ("status", COMPLETIONS, streamed(asked("status"))),
            ("whole", COMPLETIONS, plain("whole")),
            ("events", COMPLETIONS, streamed(asked("events"))),
            ("status", EMBEDDINGS, embeddings("status")),
            ("whole", EMBEDDINGS, embeddings("whole")),
        ] {
            let reply = front.http.post(path, &body).await;
            let is_told = what == "status" && [400, 404, 413, 422].contains(&code);
            let text = reply.text();
            assert_eq!(text.contains("10.0.0.1"), is_told, "{what} {code} {path}: {text}");
            assert!(reply.status.as_u16() >= 400, "{what} {code} {path}: {text}");
        }
    }
}

#[tokio::test]
async fn a_reply_of_very_many_members_is_an_engine_s_failure_and_costs_little_memory() {
    let usual = generated("cmpl-1", "ok");
    let many = format!("{}{}}}", &usual[..usual.len() - 1], members(36 << 20));
    let (of_decode, of_prefill) = (many.clone(), many);
    let decode = engine(move |heard| match &*prompt_of(heard) {
        "many" => ScriptedReply::json(200, &of_decode),
        _ => ScriptedReply::json(200, &usual),
    })
    .await;
    let prefill = engine(move |_| ScriptedReply::json(200, &of_prefill)).await;

    let front = Front::measured("{}", "retries: { decode: 0 }", &[decode.url()]).await;
    let (status, text) = little_is_made_of(&front, "a reply", &completion("many")).await;
    assert_eq!(status, 502, "{text}");

    let workers = [("prefill", prefill.url()), ("decode", decode.url())];
    let model = "connector: nixl\nretries: { prefill: 0 }";
    let front = Front::with_flow("{}", "flow: prefill_first", model, &workers).await;
    let (status, text) = little_is_made_of(&front, "a prefill reply", &completion("few")).await;
    assert_eq!(status, 200, "decode computes the prompt: {text}");
    let failed = [("worker", "w0"), ("leg", "prefill")];
    assert_eq!(front.metric("splitrail_worker_leg_failures_total", &failed).await, 1.0);
}

#[tokio::test]
async fn a_batch_makes_no_more_of_an_event_than_its_bytes() {
    const EVENT_BYTES: usize = 16 << 20;
    let list = list(EVENT_BYTES);
    let usage = r#""prompt_tokens":1,"completion_tokens":1,"total_tokens":2"#;
    let end = format!("data: {{\"id\":\"b\",\"choices\":[],\"usage\":{{{usage}}}}}\n\n");
    let choices = format!("data: {{\"id\":\"b\",\"choices\":{list}}}\n\n{end}data: [DONE]\n\n");
    let figures = format!(
        "data: {{\"id\":\"b\",\"choices\":[],\"usage\":{{{usage},\"x\":{list}}}}}\n\n\
         data: [DONE]\n\n"
    );
    let short = format!(
        "data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,\"text\":\"a\"}}]}}\n\n{end}\
         data: [DONE]\n\n"
    );
    let engine = engine(move |heard| {
        ScriptedReply::events(match &*prompt_of(heard) {
            "choices" => &choices,
            "usage" => &figures,
            _ => &short,
        })
    })
    .await;
    let front = Front::measured("{}", "retries: { decode: 0 }", &[engine.url()]).await;
    for what in ["choices", "usage"] {
        let (_, text) = little_is_made_of(&front, what, &streamed(json!(["a", what]))).await;
        assert!(text.contains("broke off"), "{what}: {} bytes", text.len());
    }
    let (_, text) = little_is_made_of(&front, "short", &streamed(json!(["a", "b"]))).await;
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("broke off"), "{text}");
}

/// A reply or an event with choices of these indices.
fn choices(indices: &[u32]) -> String {
    let choice = |index| json!({"index": index, "text": "a", "finish_reason": null});
    let choices: Vec<_> = indices.iter().map(choice).collect();
    let reply = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim", "choices": choices,
    });
    reply.to_string()
}

#[tokio::test]
async fn more_choices_than_a_batch_asked_for_count_against_the_worker() {
    // A second choice with the first one, and alone: its index would be that of the next prompt.
    for indices in [&[0, 1][..], &[1]] {
        let reply = choices(indices);
        let events = format!("data: {}\n\ndata: {reply}\n\ndata: [DONE]\n\n", choices(&[0]));
        let too_many = engine(move |heard| match heard.text().contains("\"stream\":true") {
            true => ScriptedReply::events(&events),
            false => ScriptedReply::json(200, &reply),
        })
        .await;
        for stream in [false, true] {
            let front = Front::start("{}", "retries: { decode: 0 }", &[too_many.url()]).await;
            let mut body = completion("");
            body["prompt"] = json!(["a", "b"]);
            body["stream"] = stream.into();
            let reply = front.http.post(COMPLETIONS, &body).await;
            assert_eq!(reply.status, if stream { 200 } else { 502 }, "{}", reply.text());
            let failed = [("worker", "w0"), ("leg", "decode")];
            let failures = front.metric("splitrail_worker_leg_failures_total", &failed).await;
            assert!(failures >= 1.0, "{indices:?}, stream {stream}: {failures}");
            assert!(reply.text().contains("more choices than were asked for"), "{}", reply.text());
        }
    }
}

#[tokio::test]
async fn a_prompt_of_a_batch_that_gets_too_many_choices_is_sent_to_another_worker() {
    let reply = choices(&[0, 1]);
    let too_many = engine(move |_| ScriptedReply::json(200, &reply)).await;
    let good = engine(|_| ScriptedReply::json(200, &generated("x", "good"))).await;
    let front = Front::start("{}", "", &[too_many.url(), good.url()]).await;
    let mut body = completion("");
    body["prompt"] = json!(["a", "b"]);
    let reply = front.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let texts = [0, 1].map(|at| reply.json()["choices"][at]["text"].clone());
    assert_eq!(texts, ["good", "good"]);
    assert!(too_many.heard().iter().any(ReceivedRequest::is_inference));
}

#[tokio::test]
async fn the_largest_counts_of_an_engine_add_up_in_a_batch() {
    const MOST: u32 = u32::MAX;
    let answer = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": MOST, "completion_tokens": MOST, "total_tokens": u64::from(MOST) * 2,
            "prompt_tokens_details": {"cached_tokens": MOST},
        },
    });
    let engine = engine(move |_| ScriptedReply::json(200, &answer.to_string())).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    for number in 0..5 {
        let prompts = [format!("a{number}"), format!("b{number}")];
        let body = json!({"model": "sim", "prompt": prompts, "max_tokens": 2});
        let reply = front.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let sum = u64::from(MOST) * 2;
        assert_eq!(reply.json()["usage"]["prompt_tokens"], sum);
        assert_eq!(reply.route("cached_tokens"), Some(&*sum.to_string()));
    }
}

#[tokio::test]
async fn usage_that_contradicts_itself_is_logged_once_per_worker_and_not_per_reply() {
    let contradiction = generated("x", "a").replace(
        r#""prompt_tokens":1"#,
        r#""prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":2}"#,
    );
    let nonsense = generated("x", "a").replace(r#""prompt_tokens":1"#, r#""prompt_tokens":-1"#);
    for (reply, line) in [
        (contradiction, "more cached tokens than the prompt has"),
        (nonsense, "usage counts as not reported"),
    ] {
        let answer = move |_: &ReceivedRequest| ScriptedReply::json(200, &reply);
        let engines = [engine(answer.clone()).await, engine(answer).await];
        let front = Front::start("{}", "", &engines.each_ref().map(ScriptedServer::url)).await;
        for number in 0..9 {
            let reply = front.http.post(COMPLETIONS, &completion(&number.to_string())).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        let log = front.log();
        let lines: Vec<_> = log.lines().filter(|logged| logged.contains(line)).collect();
        assert_eq!(lines.len(), 2, "{log}");
        for worker in ["w0", "w1"] {
            assert!(lines.iter().any(|line| line.contains(worker)), "{worker}: {lines:?}");
        }
    }
}

/// The names of the events of a text, by the rules of server-sent events: a line ends with CR, LF or
/// both.
fn event_names(text: &str) -> Vec<String> {
    let lines = text.replace("\r\n", "\n").replace('\r', "\n");
    let name = |event: &str| {
        let name = event.lines().find_map(|line| line.strip_prefix("event: "));
        name.unwrap_or_default().to_owned()
    };
    lines.split("\n\n").filter(|event| !event.is_empty()).map(name).collect()
}

#[tokio::test]
async fn a_carriage_return_in_an_event_makes_no_second_event_for_the_client() {
    let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":1}}}"#;
    let block = r#"{"type":"content_block_start","index":0}"#;
    let begins = format!(
        "event: message_start\ndata: {start}\n\nevent: content_block_start\r\ndata: {block}\r\n\r\n"
    );
    let forged = "event: ping\rdata: {\"type\":\"message_stop\"}\r\revent: x\n\
                  data: {\"type\":\"ping\"}\n\n";
    let spaced = "event: message_stop\ndata: {\"type\":\"ping\",\r\r\"x\":0}\n\n";
    for broken in [forged, spaced] {
        let (first, later) = (broken.to_owned(), begins.clone() + broken);
        let engine = engine(move |heard| {
            let is_first = heard.text().contains("at first");
            ScriptedReply::events(if is_first { &first } else { &later })
        })
        .await;
        let front = Front::start("{}", "retries: { decode: 0 }", &[engine.url()]).await;
        let ask = async |text: &str| {
            let body = json!({
                "model": "sim", "max_tokens": 4, "stream": true,
                "messages": [{"role": "user", "content": text}],
            });
            front.http.post("/v1/messages", &body).await
        };
        let reply = ask("at first").await;
        assert_eq!(reply.status, 502, "{}", reply.text());
        let names = event_names(&ask("later").await.text());
        assert_eq!(names, ["message_start", "content_block_start", "error"]);
    }
}

#[tokio::test]
async fn no_event_of_a_stream_tells_a_client_where_kv_blocks_are() {
    let hand_off = r#""kv_transfer_params":{"remote_host":"10.9.8.7","remote_engine_id":"secret"}"#;
    let event = |choices: &str, more: &str| {
        format!("data: {{\"id\":\"c\",\"choices\":[{choices}],{hand_off}{more}}}\n\n")
    };
    let choice = |text: &str, reason: &str| {
        format!("{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":{reason}}}")
    };
    let usage = r#","usage":{"prompt_tokens":1,"completion_tokens":4,"total_tokens":5}"#;
    let mut events: String = ["a", "b", "c"].map(|text| event(&choice(text, "null"), "")).concat();
    events += &event(&choice("d", "\"stop\""), usage);
    events += &event("", usage);
    let engine = engine(move |_| ScriptedReply::events(&events)).await;
    let front = Front::start("{}", "", &[engine.url()]).await;
    for with_usage in [true, false] {
        let mut body = streamed("x");
        body["stream_options"] = json!({"include_usage": with_usage});
        let reply = front.http.post(COMPLETIONS, &body).await;
        let text = reply.text();
        assert_eq!(reply.status, 200, "{text}");
        assert!(text.contains("\"text\":\"a\"") && text.contains("\"text\":\"d\""), "{text}");
        assert!(!text.contains("10.9.8.7") && !text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn a_usage_that_is_no_object_ends_no_request_of_a_batch() {
    for usage in ["5", "[]", "true", "null"] {
        let whole = format!(
            r#"{{"id":"c","choices":[{{"index":0,"text":"ok","finish_reason":"stop"}}],"usage":{usage}}}"#
        );
        let engine = engine(move |_| ScriptedReply::json(200, &whole)).await;
        let front = Front::start("{}", "", &[engine.url()]).await;
        let body = json!({"model": "sim", "prompt": ["a", "b"], "max_tokens": 2});
        let reply = front.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{usage}: {}", reply.text());
        assert!(reply.json().get("usage").is_none_or(Value::is_null), "{}", reply.text());
    }
}
