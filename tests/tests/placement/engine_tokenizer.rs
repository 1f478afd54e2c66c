//! `tokenizer: engine`: the router has no tokenizer files and asks the engines for the tokens of
//! prompts.

use serde_json::{Value, json};
use splitrail_sim::RecordedRequest;
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use splitrail_tests::{Cluster, Spec};

const TOKENIZE: &str = "/tokenize";
const MESSAGES: &str = "/v1/messages";
const FROM_ENGINES: &str = "splitrail_engine_tokenized_prompts_total";
const UNKNOWN: &str = "splitrail_untokenized_prompts_total";

/// A cluster whose router has no tokenizer and is patient with those of the engines, with further
/// keys of `tokenizer`.
async fn start(spec: Spec, keys: &str) -> Cluster {
    let cluster = Cluster::start(spec).await;
    let lines =
        cluster.yaml.lines().map(|line| match line.trim_start().starts_with("tokenizer:") {
            true => format!("    tokenizer: {{ kind: engine, timeout: 30s{keys} }}"),
            false => line.to_owned(),
        });
    let yaml: Vec<String> = lines.collect();
    let report = cluster.reload(&yaml.join("\n")).await;
    assert_eq!(report.status, 200, "{}", report.text());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::remove_file(cluster.files.path().join(file)).unwrap();
    }
    cluster
}

/// The requests for tokens that engines have got.
fn questions(cluster: &Cluster) -> Vec<RecordedRequest> {
    let all = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
    all.filter(|request| request.path == TOKENIZE).collect()
}

fn prompts_of(cluster: &Cluster) -> Vec<Value> {
    questions(cluster).iter().map(|question| question.body.clone()).collect()
}

#[tokio::test]
async fn prompts_are_found_in_caches_without_tokenizer_files() {
    let cluster = start(Spec::default(), "").await;
    let words = prompt(60, "cached");
    let message = json!({"model": "sim", "max_tokens": 4, "messages": [
        {"role": "user", "content": prompt(60, "message")},
    ]});
    for (path, body) in
        [(CHAT, chat(&words)), (COMPLETIONS, completion(&words)), (MESSAGES, message)]
    {
        let cold = cluster.http.post(path, &body).await;
        assert_eq!(cold.status, 200, "{}", cold.text());
        cluster.settle().await;
        let warm = cluster.http.post(path, &body).await;
        assert_eq!(warm.route("prefill"), cold.route("prefill"), "{path}: where its blocks are");
        let id = warm.header("x-request-id");
        let decision = &cluster.decisions(id).await[0];
        let counted = &warm.json()["usage"];
        let length = counted["prompt_tokens"].as_u64().or(counted["input_tokens"].as_u64());
        if path != MESSAGES {
            assert_eq!(decision["prompt_tokens"].as_u64(), length, "{path}: {decision}");
        }
        assert!(decision["prompt_blocks"].as_u64().unwrap() > 4, "{decision}");
    }
    // Each prompt was asked about once, and known the second time.
    assert_eq!(questions(&cluster).len(), 3, "{:#?}", prompts_of(&cluster));
    for source in ["engine", "kept"] {
        assert_eq!(cluster.metric(FROM_ENGINES, &[("source", source)]).await, 3.0, "{source}");
    }
    assert_eq!(cluster.metric(UNKNOWN, &[]).await, 0.0);
    assert_eq!(cluster.metric("splitrail_prompt_length_mismatches_total", &[]).await, 0.0);
    cluster.quiet().await;
}

#[tokio::test]
async fn engines_are_asked_in_turn_and_are_sent_nothing_but_the_prompt() {
    let cluster = start(Spec::aggregated(3), ", cache_size: 0").await;
    for turn in 0..6 {
        let mut body = chat(&prompt(4, &format!("turn{}", turn % 2)));
        body["cache_salt"] = "secret".into();
        body["temperature"] = 0.5.into();
        assert_eq!(cluster.http.post(CHAT, &body).await.status, 200);
    }
    for (name, engine) in &cluster.engines {
        let requests = engine.requests();
        let asked = requests.iter().filter(|request| request.path == TOKENIZE).count();
        assert_eq!(asked, 2, "{name}");
    }
    for question in prompts_of(&cluster) {
        let mut members: Vec<&str> =
            question.as_object().unwrap().keys().map(String::as_str).collect();
        members.sort_unstable();
        let expected = ["add_generation_prompt", "add_special_tokens", "messages", "model"];
        assert_eq!(members, expected);
    }
    assert_eq!(cluster.metric(FROM_ENGINES, &[("source", "kept")]).await, 0.0, "no room");
}

#[tokio::test]
async fn a_batch_gets_the_tokens_of_each_of_its_prompts() {
    let cluster = start(Spec::aggregated(2), "").await;
    let prompts = [prompt(20, "one"), prompt(30, "two"), prompt(20, "one")];
    let body = json!({"model": "sim", "max_tokens": 2, "n": 2, "prompt": prompts});
    let reply = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let decisions = cluster.decisions(reply.header("x-request-id")).await;
    assert_eq!(decisions.len(), 3);
    let lengths: u64 = decisions.iter().map(|one| one["prompt_tokens"].as_u64().unwrap()).sum();
    assert_eq!(reply.json()["usage"]["prompt_tokens"], lengths);
}

#[tokio::test]
async fn without_tokens_a_request_is_placed_by_load_and_the_record_says_why() {
    let spec = Spec { engine: |_, config| config.offers_tokenize = false, ..Spec::aggregated(2) };
    let cluster = start(spec, "").await;
    for turn in 0..4 {
        let reply = cluster.http.post(CHAT, &chat(&prompt(9, &format!("load{turn}")))).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
        assert_eq!(decision["prompt_unknown"], "no engine to ask for tokens", "{decision}");
    }
    let reason = [("reason", "no_engine_to_ask_for_tokens")];
    assert_eq!(cluster.metric(UNKNOWN, &reason).await, 4.0);
    assert_eq!(questions(&cluster).len(), 2, "an engine without the endpoint is not asked again");
}

#[tokio::test]
async fn a_prompt_that_the_endpoint_cannot_express_is_not_asked_about() {
    let cluster = start(Spec::aggregated(1), "").await;
    let image = json!({"type": "image_url", "image_url": {"url": "http://a/b.png"}});
    let body = json!({"model": "sim", "max_tokens": 2, "messages": [
        {"role": "user", "content": [image]},
    ]});
    let reply = cluster.http.post(CHAT, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let decision = &cluster.decisions(reply.header("x-request-id")).await[0];
    assert_eq!(decision["prompt_unknown"], "images, audio, video or files", "{decision}");
    assert!(questions(&cluster).is_empty());
}

#[tokio::test]
async fn an_engine_that_gives_no_tokens_in_time_is_waited_for_no_longer() {
    let model = "    tokenizer: { kind: engine, timeout: 50ms, in_flight_max: 1 }\n";
    let solo = Solo::start_with("{}", model, |heard| match heard.target.as_str() {
        TOKENIZE => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
        _ => whole_reply(),
    })
    .await;
    let reply = solo.http.post(COMPLETIONS, &completion("late")).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let late = [("reason", "the_tokens_of_the_engine_came_too_late")];
    assert_eq!(solo.metric(UNKNOWN, &late).await, 1.0);
    // Prompts beyond the bound do not wait at all.
    let body = json!({"model": "sim", "max_tokens": 2, "prompt": ["a", "b", "c"]});
    let reply = solo.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    eventually("two prompts found too many that wait", async || {
        let busy = [("reason", "too_many_prompts_wait_for_tokens_of_engines")];
        solo.metric(UNKNOWN, &busy).await == 2.0
    })
    .await;
}
