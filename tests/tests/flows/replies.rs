//! All flows give the same replies.

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, KvConnector};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Spec, Trial};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn prompt(words: usize, salt: &str) -> String {
    (0..words).map(|i| format!("{salt}{i} ")).collect()
}

fn chat(text: &str) -> Value {
    json!({
        "model": "sim", "max_tokens": 12, "temperature": 0,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
    })
}

fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 12, "temperature": 0, "prompt": text})
}

#[tokio::test]
async fn pd_answers_equal_aggregated_ones_on_both_endpoints_streamed_and_not() {
    let pd = Cluster::start(Spec::default()).await;
    let one = Cluster::start(Spec::aggregated(1)).await;
    for (path, body) in
        [(CHAT, chat(&prompt(40, "a"))), (COMPLETIONS, completion(&prompt(50, "b")))]
    {
        let expected = whole_text(&one.http.post(path, &body).await.json(), 0);
        let reply = pd.http.post(path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("flow"), Some("prefill_first"));
        assert!(reply.route("prefill").unwrap().starts_with('p'));
        assert!(reply.route("decode").unwrap().starts_with('d'));
        assert_eq!(whole_text(&reply.json(), 0), expected);
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let chunks = pd.http.stream(path, &streamed).await.chunks().await;
        assert_eq!(streamed_text(&chunks, 0), expected);
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "usage was not asked for");
    }
    pd.quiet().await;
    let pulled: u64 =
        ["d0", "d1"].map(|d| pd.engine(d).state().totals.external_kv_transfer_tokens).iter().sum();
    let told = [("leg", "decode"), ("source", "external_kv_transfer")];
    assert_eq!(pd.metric("splitrail_prompt_tokens_total", &told).await, pulled as f64);
    assert!(pulled > 0);
}

#[tokio::test]
async fn the_second_turn_goes_to_the_holder_and_its_estimate_is_what_the_engine_finds() {
    let cluster = Cluster::start(Spec { prefill: 3, decode: 1, ..Spec::default() }).await;
    let first = cluster.http.post(CHAT, &chat(&prompt(60, "c"))).await;
    assert_eq!(first.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    cluster.settle().await;
    let holder = first.route("prefill").unwrap().to_owned();
    for _ in 0..5 {
        let again = cluster.http.post(CHAT, &chat(&prompt(60, "c"))).await;
        assert_eq!(again.route("prefill"), Some(holder.as_str()));
        let cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let prompt_tokens = again.json()["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(cached, Some((prompt_tokens - 1) / 16 * 16));
        let decision = &cluster.decisions(again.header("x-request-id")).await[0];
        assert_eq!(decision["estimated_cached_tokens"].as_u64(), cached);
        assert_eq!(decision["prompt_tokens"].as_u64(), Some(prompt_tokens));
    }
    assert_eq!(cluster.metric("splitrail_cached_tokens_error_blocks_sum", &[]).await, 0.0);
}

#[tokio::test]
async fn a_batch_is_split_and_merged_as_if_it_were_one() {
    let cluster = Cluster::start(Spec::default()).await;
    let prompts = [prompt(30, "d"), prompt(40, "e"), prompt(50, "f")];
    let mut single = Vec::new();
    for text in &prompts {
        single.push(whole_text(&cluster.http.post(COMPLETIONS, &completion(text)).await.json(), 0));
    }
    let mut body = completion("");
    body["prompt"] = json!(prompts);
    let reply = cluster.http.post(COMPLETIONS, &body).await.json();
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        assert_eq!(choice["text"], single[i].as_str());
    }
    assert_eq!(reply["usage"]["completion_tokens"], 36);
    assert!(reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let chunks = cluster.http.stream(COMPLETIONS, &body).await.chunks().await;
    for (i, text) in single.iter().enumerate() {
        assert_eq!(&streamed_text(&chunks, i as u64), text);
    }
    let with_usage: Vec<_> = chunks.iter().filter(|chunk| !chunk["usage"].is_null()).collect();
    assert_eq!(with_usage.len(), 1);
    assert_eq!(with_usage[0]["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens"]);
    cluster.quiet().await;
}

#[tokio::test]
async fn several_samples_take_one_hand_off() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut body = completion(&prompt(40, "g"));
    body["n"] = 3.into();
    let reply = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.route("local"), None);
    let engines = ["p0", "p1", "d0", "d1"].map(|engine| cluster.engine(engine));
    let staged = engines.iter().map(|engine| engine.state().totals.hand_offs_staged).sum::<u64>();
    let pulled = engines.iter().map(|engine| engine.state().totals.hand_offs_pulled).sum::<u64>();
    assert_eq!((staged, pulled), (1, 1));
    let indices: Vec<_> =
        reply.json()["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2]);
    cluster.quiet().await;
}

#[tokio::test]
async fn the_route_header_counts_the_prompt_of_samples_that_are_sent_apart_once() {
    let spec = Spec { connector: KvConnector::Sglang, prefill: 1, decode: 1, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let mut body = completion(&prompt(40, "apart"));
    let single = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(single.status, 200, "{}", single.text());
    cluster.settle().await;
    let single = cluster.http.post(COMPLETIONS, &body).await;
    cluster.settle().await;
    body["n"] = 3.into();
    let reply = cluster.http.post(COMPLETIONS, &body).await;
    let cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].to_string();
    assert_ne!(cached, "0");
    assert_eq!(reply.route("cached_tokens"), Some(cached.as_str()));
    assert_eq!(reply.route("overlap_blocks"), single.route("overlap_blocks"));
}

#[tokio::test]
async fn short_prompts_are_prefilled_where_they_are_decoded() {
    let spec = Spec { model: "local_prefill_max_tokens: 100".into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let short = cluster.http.post(COMPLETIONS, &completion("hello")).await;
    assert_eq!((short.route("local"), short.route("prefill")), (Some("short_prompt"), None));
    let long = cluster.http.post(COMPLETIONS, &completion(&prompt(60, "h"))).await;
    assert_eq!(long.route("local"), None);
    assert!(long.route("prefill").is_some());
}

/// Takes an engine away, and waits until the router knows.
async fn take_away(cluster: &mut Cluster, name: &str) {
    let place = cluster.engines.iter().position(|(other, _)| other == name).unwrap();
    cluster.engines.remove(place).1.shutdown().await;
    eventually("the router knows that it is gone", async || {
        cluster.metric("splitrail_worker_up", &[("worker", name)]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn the_last_of_two_all_round_workers_serves_alone() {
    let spec = Spec { prefill: 0, decode: 0, both: 2, ..Spec::default() };
    let mut cluster = Cluster::start(spec).await;
    let body = completion(&prompt(50, "alone"));
    let handed_over = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(handed_over.route("flow"), Some("prefill_first"));
    take_away(&mut cluster, "w0").await;
    for _ in 0..4 {
        let reply = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("decode"), Some("w1"));
        assert_eq!(whole_text(&reply.json(), 0), whole_text(&handed_over.json(), 0));
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn no_prompt_is_prefilled_without_a_decode_worker() {
    let mut cluster = Cluster::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    take_away(&mut cluster, "d0").await;
    for _ in 0..3 {
        let reply = cluster.http.post(COMPLETIONS, &completion(&prompt(50, "vain"))).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
    }
    assert!(cluster.engine("p0").requests().iter().all(|seen| seen.path != COMPLETIONS));
    assert_eq!(cluster.engine("p0").state().blocks_pinned, 0);
    cluster.quiet().await;
}

#[tokio::test]
async fn embeddings_of_prompts_are_never_handed_over() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut body = completion("");
    body["prompt"] = json!([prompt(30, "a"), prompt(30, "b")]);
    body["prompt_embeds"] = json!([]);
    assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 400);
    let engines = cluster.engines.iter();
    let mut requests = engines.flat_map(|(_, engine)| engine.requests());
    assert!(requests.all(|seen| seen.path != COMPLETIONS));
}

#[tokio::test]
async fn a_retried_request_is_one_local_prefill() {
    let policy = "{ kind: round_robin }";
    let model = "local_prefill_max_tokens: 100".into();
    let cluster = Cluster::start(Spec { policy, model, ..Spec::default() }).await;
    for decode in ["d0", "d1"] {
        let kind = FaultKind::Status { status: 500 };
        cluster.engine(decode).set_fault(Fault { kind, times: Some(1) });
    }
    // Both fail once: the first request is tried twice, in vain.
    assert_eq!(cluster.http.post(COMPLETIONS, &completion("hello")).await.status, 502);
    assert_eq!(cluster.metric("splitrail_retries_total", &[("leg", "decode")]).await, 1.0);
    let short = [("reason", "short_prompt")];
    assert_eq!(cluster.metric("splitrail_local_prefills_total", &short).await, 1.0);
}

#[tokio::test]
async fn if_all_other_workers_are_down_the_error_is_reported_without_a_retry() {
    let model = "on_no_prefill: fail".into();
    let mut cluster = Cluster::start(Spec { model, ..Spec::default() }).await;
    take_away(&mut cluster, "p0").await;
    let kind = FaultKind::Status { status: 500 };
    cluster.engine("p1").set_fault(Fault { kind, times: None });
    let reply = cluster.http.post(COMPLETIONS, &completion(&prompt(50, "real"))).await;
    assert_eq!(reply.status, 503);
    assert!(reply.text().contains("p1 answered with status 500"), "{}", reply.text());
    assert_eq!(cluster.metric("splitrail_retries_total", &[]).await, 0.0);
}

#[tokio::test]
async fn an_answer_of_one_token_is_not_computed_on_decode_where_that_is_forbidden() {
    for flow in ["prefill_first", "decode_first", "auto"] {
        let model = "on_no_prefill: fail".into();
        let spec = Spec { prefill: 1, decode: 1, flow, model, ..Spec::default() };
        let mut trial = Trial::start(spec).await;
        trial.cluster.engines.remove(0).1.shutdown().await;
        let mut body = completion(&prompt(40, "one"));
        body["max_tokens"] = 1.into();
        let reply = trial.post("no_worker", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 503, "{flow}: {}", reply.text());
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_reply_of_one_token_on_a_decode_worker_is_reported_as_missing_prefill() {
    let mut trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    trial.cluster.engines.remove(0).1.shutdown().await;
    let mut body = completion(&prompt(40, "one"));
    body["max_tokens"] = 1.into();
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.route("local"), Some("no_prefill"));
    assert_eq!(trial.local_prefills().await, 1.0);
    trial.finish().await;
}
