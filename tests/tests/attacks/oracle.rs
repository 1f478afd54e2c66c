//! A client that asks whether another client has sent a prompt: with tenants, no reply says so.

use serde_json::{Value, json};
use splitrail_proto::v1::generate_response::Event;
use splitrail_tests::client::Reply;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::tenants::{Keys, bearer, post, start};
use splitrail_tests::trial::{CHAT, COMPLETIONS, GENERATE, prompt, token_ids};
use splitrail_tests::{Cluster, Spec, dialect};

/// The spy sees the route of its own requests, which says most.
const TENANTS: &str = "tenants: [ { name: victim }, { name: spy, debug: true } ]";
/// Words of the secret: about two thousand tokens.
const WORDS: usize = 500;

/// What the victim sends, and the same with one token more.
fn secrets() -> Vec<(&'static str, Value, Value)> {
    let secret = |path: &str| prompt(WORDS, &path.replace('/', ""));
    let of_text = |path, body: fn(&str) -> Value| {
        let text = secret(path);
        (path, body(&text), body(&format!("{text}?")))
    };
    let of_ids = |ids: &[u32]| json!({"model": "sim", "token_ids": ids, "sampling_params": {"max_tokens": 1}});
    let ids = token_ids(2000, 1);
    vec![
        of_text(CHAT, |text| dialect::chat_of(text, 1)),
        of_text(COMPLETIONS, |text| json!({"model": "sim", "max_tokens": 1, "prompt": text})),
        of_text(dialect::RESPONSES, |text| dialect::request(dialect::RESPONSES, text, 1)),
        of_text(dialect::MESSAGES, |text| dialect::request(dialect::MESSAGES, text, 1)),
        (GENERATE, of_ids(&ids), of_ids(&[&ids[..], &[5]].concat())),
    ]
}

/// The cached tokens of a reply, by what its body says.
fn cached_tokens(reply: &Reply) -> u64 {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let usage = &reply.json()["usage"];
    let places = [
        &usage["prompt_tokens_details"]["cached_tokens"],
        &usage["input_tokens_details"]["cached_tokens"],
        &usage["cache_read_input_tokens"],
    ];
    places.into_iter().filter_map(Value::as_u64).sum()
}

/// Asserts that a reply to the spy says that no block was found.
fn says_nothing(path: &str, reply: &Reply) {
    assert_eq!(cached_tokens(reply), 0, "{path}: {}", reply.text());
    let route = reply.header("x-splitrail-route");
    for figure in ["overlap_blocks=0", "cached_tokens=0"] {
        assert!(route.split("; ").any(|entry| entry == figure), "{path}: {route}");
    }
}

#[tokio::test]
async fn no_reply_to_one_tenant_depends_on_the_prompts_of_another() {
    let mut keys = Keys::empty();
    let [victim, spy] = ["victim", "spy"].map(|tenant| keys.tenant(tenant));
    let spec = Spec { prefill: 1, decode: 1, ..Spec::default() };
    let cluster = start(&keys, TENANTS, spec).await;
    for (path, secret, guess) in secrets() {
        let ask = async |key: &str, body: &Value| {
            let reply = post(&cluster.http, path, key, body).await;
            cluster.settle().await;
            reply
        };
        assert_eq!(cached_tokens(&ask(&victim, &secret).await), 0, "{path}");
        says_nothing(path, &ask(&spy, &guess).await);
        // The guess would have been found out: each finds the blocks of its own.
        assert!(cached_tokens(&ask(&victim, &guess).await) > 1000, "{path}");
        let own = ask(&spy, &guess).await;
        assert!(cached_tokens(&own) > 1000, "{path}: {}", own.text());
        assert_ne!(own.route("overlap_blocks"), Some("0"), "{path}");
    }
}

/// The overlap and the cached tokens of a call, as it is told of them.
async fn call(cluster: &Cluster, key: &str, text: &str) -> (Option<u32>, u64) {
    let mut call = tonic::Request::new(text_request(text, ""));
    call.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
    let mut client = grpc_client(cluster.running.addresses.grpc.unwrap());
    let mut events = client.generate(call).await.unwrap().into_inner();
    let (mut overlap, mut cached) = (None, None);
    while let Some(response) = events.message().await.unwrap() {
        match response.event {
            Some(Event::Started(started)) => {
                overlap = started.route.map(|route| route.overlap_blocks);
            }
            Some(Event::Usage(usage)) => cached = usage.cached_tokens,
            _ => {}
        }
    }
    cluster.settle().await;
    (overlap, cached.expect("a figure"))
}

#[tokio::test]
async fn no_call_of_one_tenant_depends_on_the_prompts_of_another() {
    let mut keys = Keys::empty();
    let [victim, spy] = ["victim", "spy"].map(|tenant| keys.tenant(tenant));
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let secret = prompt(WORDS, "call");
    let guess = format!("{secret}?");
    assert_eq!(call(&cluster, &victim, &secret).await, (None, 0));
    assert_eq!(call(&cluster, &spy, &guess).await, (Some(0), 0));
    // The guess would have been found out.
    assert!(call(&cluster, &victim, &guess).await.1 > 1000);
}
