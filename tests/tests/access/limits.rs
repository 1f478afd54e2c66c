//! Limits on requests and tokens: what is admitted, what replies say, and what is settled.

use serde_json::{Value, json};
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::{self, MESSAGES, RESPONSES};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tenants::{Keys, bearer, complete, post, start};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use splitrail_tests::{Cluster, Spec};

async fn limited(keys: &Keys, limits: &str) -> Cluster {
    let tenants = format!("tenants: [ {{ name: acme, limits: {limits} }}, {{ name: free }} ]");
    start(keys, &tenants, Spec::aggregated(1)).await
}

/// A number in a header.
fn number(reply: &Reply, name: &str) -> u64 {
    reply.header(name).parse().unwrap_or_else(|_| panic!("{name}: {:?}", reply.headers))
}

#[tokio::test]
async fn requests_of_a_minute_are_counted_and_reported_to_the_client() {
    let mut keys = Keys::empty();
    let [acme, free] = ["acme", "free"].map(|name| keys.tenant(name));
    let cluster = limited(&keys, "{ requests_per_minute: 2 }").await;
    let body = completion(&prompt(8, "a"));
    for left in [1, 0] {
        let reply = complete(&cluster.http, &acme, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(number(&reply, "x-ratelimit-limit-requests"), 2);
        assert_eq!(number(&reply, "x-ratelimit-remaining-requests"), left);
        assert!(reply.header("x-ratelimit-reset-requests").ends_with('s'));
        assert_eq!(reply.header("x-ratelimit-limit-tokens"), "", "there is no such limit");
    }
    let before = cluster.engine("w0").requests().len();
    let refused = complete(&cluster.http, &acme, &body).await;
    assert_eq!(refused.status, 429);
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("requests"), &json!("rate_limit_exceeded"))
    );
    let (ms, s) = (number(&refused, "retry-after-ms"), number(&refused, "retry-after"));
    assert!((1..=61_000).contains(&ms) && s == ms.div_ceil(1000), "{ms} {s}");
    assert_eq!(refused.header("x-should-retry"), "");
    assert_eq!(cluster.engine("w0").requests().len(), before, "no engine was asked");
    let reply = complete(&cluster.http, &free, &body).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-ratelimit-limit-requests")), (200, ""));
}

#[tokio::test]
async fn tokens_are_reserved_exactly_and_settled_to_the_ledger() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ tokens_per_minute: 5000 }").await;
    let left = async || {
        let authorization = bearer(&acme);
        let headers = [("authorization", authorization.as_str())];
        number(&cluster.http.get_with("/v1/models", &headers).await, "x-ratelimit-remaining-tokens")
    };
    let mut body = completion(&prompt(100, "a "));
    body["max_tokens"] = json!(500);
    body["stop"] = json!("none");
    let reply = complete(&cluster.http, &acme, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let usage = reply.json()["usage"].clone();
    let tokens = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let spent = tokens("prompt_tokens") + tokens("completion_tokens");
    assert_eq!(left().await, 5000 - spent, "what was not generated is given back");
    cluster.settle().await;

    // The second time, what is cached costs nothing.
    let again = complete(&cluster.http, &acme, &body).await;
    let usage = again.json()["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0);
    let uncached = usage["prompt_tokens"].as_u64().unwrap() - cached;
    let spent = spent + uncached + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(left().await, 5000 - spent);

    // A request that may use more than is left is refused, before an engine is asked.
    body["max_tokens"] = json!(5000 - spent + 1);
    let refused = complete(&cluster.http, &acme, &body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert_eq!(refused.json()["error"]["type"], "tokens");
    assert_eq!(left().await, 5000 - spent, "a refused request counts nothing");
    // One that can never fit is refused for good.
    body["max_tokens"] = json!(6000);
    let never = complete(&cluster.http, &acme, &body).await;
    assert_eq!((never.status.as_u16(), never.header("x-should-retry")), (429, "false"));
    assert_eq!(never.json()["error"]["code"], "insufficient_quota");
}

#[tokio::test]
async fn the_most_output_that_any_engine_reads_from_a_request_is_reserved() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ tokens_per_minute: 50000 }").await;
    let reserved = async || {
        cluster.metric("splitrail_tenant_reserved_tokens_total", &[("tenant", "acme")]).await as u64
    };
    // SGLang lets `max_tokens` of a chat take precedence, and takes 0 for no limit.
    let cases = [
        (CHAT, json!({"max_completion_tokens": 1, "max_tokens": 4000}), 4000),
        (CHAT, json!({"max_completion_tokens": 30, "max_tokens": 3}), 30),
        (CHAT, json!({"max_completion_tokens": 7, "max_tokens": null}), 7),
        (CHAT, json!({"max_completion_tokens": 0, "max_tokens": 5}), 1024),
        (CHAT, json!({"max_tokens": 0}), 1024),
        (CHAT, json!({"max_tokens": 9, "n": 3}), 27),
        (COMPLETIONS, json!({"max_tokens": 0}), 1024),
        (COMPLETIONS, json!({"max_tokens": 11}), 11),
        (RESPONSES, json!({"max_output_tokens": 13}), 13),
        (RESPONSES, json!({"max_output_tokens": 0}), 1024),
        (MESSAGES, json!({"max_tokens": 0}), 1024),
    ];
    for (place, (path, members, output)) in cases.iter().enumerate() {
        // No two of them have a block in common.
        let text = |number: usize| format!("{number:08}");
        let of = |number: usize| {
            let mut body = match *path {
                CHAT => chat(&text(number)),
                COMPLETIONS => completion(&text(number)),
                path => dialect::request(path, &text(number), 1),
            };
            body["cache_salt"] = json!(text(number));
            body
        };
        let [mut least, mut body] = [of(2 * place), of(2 * place + 1)];
        // The reservation of the prompt alone, by a request with the least output.
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            for body in [&mut least, &mut body] {
                body.as_object_mut().unwrap().remove(name);
            }
        }
        least[if *path == RESPONSES { "max_output_tokens" } else { "max_tokens" }] = json!(1);
        let mut before = reserved().await;
        post(&cluster.http, path, &acme, &least).await;
        let prompt = reserved().await - before - 1;
        for (name, value) in members.as_object().unwrap() {
            body[name] = value.clone();
        }
        before = reserved().await;
        post(&cluster.http, path, &acme, &body).await;
        assert_eq!(reserved().await - before, prompt + output, "{path} {members}");
    }
}

#[tokio::test]
async fn several_samples_of_a_fresh_prompt_cost_the_whole_prompt() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ tokens_per_minute: 50000 }").await;
    let authorization = bearer(&acme);
    let headers = [("authorization", authorization.as_str())];
    let left = async || {
        number(&cluster.http.get_with("/v1/models", &headers).await, "x-ratelimit-remaining-tokens")
    };
    let mut body = completion(&prompt(500, "a "));
    (body["n"], body["max_tokens"]) = (json!(2), json!(1));
    let mut before = left().await;
    // The second sample finds the blocks of the first one in the engine's cache.
    let fresh = complete(&cluster.http, &acme, &body).await;
    assert_eq!(fresh.status, 200, "{}", fresh.text());
    let usage = fresh.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "{usage}");
    let decisions = cluster.decisions(fresh.header("x-request-id")).await;
    assert_eq!(decisions[0]["cached_source"], "estimate", "{}", decisions[0]);
    let spent = |usage: &Value| {
        let tokens = |name: &str| usage[name].as_u64().unwrap();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        tokens("prompt_tokens") - cached + tokens("completion_tokens")
    };
    assert_eq!(left().await, before - spent(&usage));
    before = left().await;
    cluster.settle().await;
    // What the worker held before the request is cached, and costs nothing.
    let again = complete(&cluster.http, &acme, &body).await;
    let usage = again.json()["usage"].clone();
    assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{usage}");
    assert_eq!(left().await, before - spent(&usage));
}

/// A whole reply with this usage.
fn reply_with(usage: &Value) -> ScriptedReply {
    let choice = json!({"index": 0, "text": "ok", "finish_reason": "length"});
    let reply = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim", "choices": [choice],
        "usage": usage,
    });
    ScriptedReply::json(200, &reply.to_string())
}

/// A streamed message that counts its prompt when it begins, and nothing when it ends.
fn message_without_usage() -> ScriptedReply {
    let start = json!({
        "id": "m", "type": "message", "role": "assistant", "content": [],
        "usage": {"input_tokens": 2, "output_tokens": 1},
    });
    let events = [
        json!({"type": "message_start", "message": start}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": null}),
        json!({"type": "message_stop"}),
    ];
    let named =
        |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    ScriptedReply::events(&events.iter().map(named).collect::<String>())
}

/// A router with a tenant `acme` in front of an engine whose replies are all made by `reply`.
async fn with_reply(
    keys: &Keys,
    tokens_per_day: u32,
    reply: impl Fn() -> ScriptedReply + Send + Sync + 'static,
) -> (Cluster, ScriptedServer) {
    let engine = ScriptedServer::start(move |heard| match heard.is_inference() {
        true => reply(),
        false => ScriptedReply::json(200, r#"{"data":[{"id":"sim"}]}"#),
    })
    .await;
    let worker = format!("{{ id: w, role: both, url: \"{}\" }}", engine.url());
    let spec = Spec {
        policy: "{ kind: round_robin }",
        extra_workers: vec![worker],
        ..Spec::aggregated(0)
    };
    let limits =
        format!("{{ tokens_per_day: {tokens_per_day}, tokens_per_minute: {tokens_per_day} }}");
    let tenants = format!("tenants: [ {{ name: acme, limits: {limits} }} ]");
    let cluster = start(keys, &tenants, spec).await;
    eventually("the engine is up", async || {
        cluster.metric("splitrail_worker_up", &[]).await == 1.0
    })
    .await;
    (cluster, engine)
}

#[tokio::test]
async fn what_an_engine_claims_costs_no_more_than_the_request_can_have() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let usage = json!({
        "prompt_tokens": 4_000_000_000_u32, "completion_tokens": 4_000_000_000_u32,
        "total_tokens": 4_000_000_000_u32,
    });
    let (cluster, _engine) = with_reply(&keys, 1000, move || reply_with(&usage)).await;
    let mut body = completion("a b c");
    body["max_tokens"] = json!(1);
    for _ in 0..3 {
        let reply = complete(&cluster.http, &acme, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let usage = &reply.json()["usage"];
        assert_eq!(usage["completion_tokens"], 4_000_000_000_u32, "clients see what it said");
    }
}

/// The path of a request, its body, and what makes the engine's reply to it.
type Case<'a> = (&'a str, &'a Value, fn() -> ScriptedReply);

#[tokio::test]
async fn a_request_of_which_the_engine_does_not_report_all_tokens_costs_what_it_had_reserved() {
    let message = json!({
        "model": "sim", "max_tokens": 500, "stream": true,
        "messages": [{"role": "user", "content": "a b c"}],
    });
    let mut prompt = completion("a b c");
    prompt["max_tokens"] = json!(500);
    let cases: [Case<'_>; 3] = [
        (COMPLETIONS, &prompt, || reply_with(&Value::Null)),
        (COMPLETIONS, &prompt, || reply_with(&json!({"prompt_tokens": 2}))),
        (MESSAGES, &message, message_without_usage),
    ];
    for (path, body, reply) in cases {
        let mut keys = Keys::empty();
        let acme = keys.tenant("acme");
        let (cluster, _engine) = with_reply(&keys, 5000, reply).await;
        let authorization = bearer(&acme);
        let headers = [("authorization", authorization.as_str())];
        let left = async || {
            let reply = cluster.http.get_with("/v1/models", &headers).await;
            number(&reply, "x-ratelimit-remaining-tokens")
        };
        let before = left().await;
        assert_eq!(post(&cluster.http, path, &acme, body).await.status, 200);
        let spent = before - left().await;
        assert!((501..600).contains(&spent), "{path}: {spent}");
    }
}

#[tokio::test]
async fn a_tenant_that_has_used_up_its_requests_is_refused_before_its_body_is_prepared() {
    let mut keys = Keys::empty();
    let [acme, free] = ["acme", "free"].map(|name| keys.tenant(name));
    let cluster = limited(&keys, "{ requests_per_minute: 1 }").await;
    let body = completion(&prompt(8, "a"));
    // What is refused for another reason is not counted.
    let wrong = json!({"model": "sim", "prompt": prompt(50_000, "b"), "n": -1});
    assert_eq!(complete(&cluster.http, &acme, &wrong).await.status, 400);
    assert_eq!(complete(&cluster.http, &acme, &body).await.status, 200);
    for _ in 0..4 {
        let refused = complete(&cluster.http, &acme, &wrong).await;
        assert_eq!(refused.status, 429, "its mistake was found: {}", refused.text());
        assert!(number(&refused, "retry-after-ms") > 0);
    }
    assert_eq!(complete(&cluster.http, &free, &body).await.status, 200);
}

#[tokio::test]
async fn what_a_request_has_reserved_and_not_used_is_given_back_when_its_client_leaves() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let tenants = "tenants: [ { name: acme, limits: { tokens_per_minute: 1000 } } ]";
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let cluster = start(&keys, tenants, spec).await;
    let long = json!({"model": "sim", "max_tokens": 900, "prompt": "a b c", "stream": true});
    let authorization = bearer(&acme);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = cluster.http.stream_with(COMPLETIONS, &headers, &long).await;
    stream.next().await.unwrap();
    let standing = async || {
        let reply = cluster.http.get_with("/v1/models", &headers).await;
        number(&reply, "x-ratelimit-remaining-tokens")
    };
    assert!(standing().await < 100, "the whole answer is reserved while it runs");
    drop(stream);
    cluster.quiet().await;
    let settled = cluster.metric("splitrail_tenant_settled_tokens_total", &[]).await;
    assert!(settled > 0.0, "what has arrived is paid for");
    assert_eq!(standing().await as f64, 1000.0 - settled);
}

#[tokio::test]
async fn a_quota_of_a_day_is_not_waited_for() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ tokens_per_day: 100 }").await;
    let body = completion(&prompt(50, "a "));
    let mut refused = None;
    for turn in 0..20 {
        let mut body = body.clone();
        body["prompt"] = json!(prompt(50, &format!("{turn} ")));
        let reply = complete(&cluster.http, &acme, &body).await;
        if reply.status != 200 {
            refused = Some(reply);
            break;
        }
    }
    let refused = refused.expect("the quota ends");
    assert_eq!((refused.status.as_u16(), refused.header("x-should-retry")), (429, "false"));
    assert_eq!(refused.json()["error"]["code"], "insufficient_quota");
    assert_eq!(refused.header("retry-after"), "");
}

#[tokio::test]
async fn messages_have_the_headers_of_their_api() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ requests_per_minute: 1, tokens_per_minute: 100000 }").await;
    let message = |text: &str| -> Value {
        json!({"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": text}]})
    };
    let reply = post(&cluster.http, MESSAGES, &acme, &message("hi")).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(number(&reply, "anthropic-ratelimit-requests-limit"), 1);
    assert_eq!(number(&reply, "anthropic-ratelimit-requests-remaining"), 0);
    assert_eq!(number(&reply, "anthropic-ratelimit-tokens-limit"), 100_000);
    let reset = reply.header("anthropic-ratelimit-requests-reset");
    assert!(humantime::parse_rfc3339(reset).is_ok(), "{reset}");
    let refused = post(&cluster.http, MESSAGES, &acme, &message("hi")).await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
}

#[tokio::test]
async fn a_limit_that_a_reload_changes_keeps_what_was_used() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = limited(&keys, "{ requests_per_minute: 2 }").await;
    let body = completion(&prompt(8, "a"));
    assert_eq!(complete(&cluster.http, &acme, &body).await.status, 200);
    let yaml = cluster.yaml.replace("requests_per_minute: 2", "requests_per_minute: 1");
    assert_eq!(cluster.reload(&yaml).await.status, 200);
    assert_eq!(complete(&cluster.http, &acme, &body).await.status, 429);
    let yaml = cluster.yaml.replace("requests_per_minute: 2", "requests_per_minute: 3");
    assert_eq!(cluster.reload(&yaml).await.status, 200);
    let reply = complete(&cluster.http, &acme, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(number(&reply, "x-ratelimit-remaining-requests"), 1);
}
