//! The gRPC listener serves the same answers, by the same rules, as the HTTP one.

mod explain;
mod usage;

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use prost::Message;
use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_proto::v1::explain_request::Subject;
use splitrail_proto::v1::front_door_service_client::FrontDoorServiceClient;
use splitrail_proto::v1::generate_request::Prompt;
use splitrail_proto::v1::generate_response::Event;
use splitrail_sim::{Fault, FaultKind, SimConfig, UsageReport};
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Reply, Spec};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn channel(cluster: &Cluster) -> Channel {
    let address = cluster.running.addresses.grpc.unwrap();
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

async fn client(cluster: &Cluster) -> FrontDoorServiceClient<Channel> {
    FrontDoorServiceClient::new(channel(cluster).await)
}

fn words(count: usize, salt: &str) -> String {
    (0..count).map(|i| format!("{salt}{i} ")).collect()
}

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.into(), content: content.into(), ..Default::default() }
}

fn generate(prompt: Prompt) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "sim".into(),
        prompt: Some(prompt),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(12),
            temperature: Some(0.0),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// All of a call's events, in the promised order.
#[derive(Debug)]
struct Answer {
    started: v1::Started,
    texts: BTreeMap<u32, String>,
    finish_reasons: BTreeMap<u32, String>,
    usage: v1::Usage,
}

async fn answer(
    client: &mut FrontDoorServiceClient<Channel>,
    request: v1::GenerateRequest,
) -> Result<Answer, Status> {
    let mut events = client.generate(request).await?.into_inner();
    let mut next = async || Ok::<_, Status>(events.message().await?.map(|m| m.event.unwrap()));
    let Some(Event::Started(started)) = next().await? else {
        panic!("`started` comes first");
    };
    let (mut texts, mut finish_reasons) = (BTreeMap::new(), BTreeMap::new());
    let usage = loop {
        match next().await?.expect("usage before the end") {
            Event::Started(again) => panic!("started twice: {again:?}"),
            Event::Delta(v1::Delta { index, text, .. }) => {
                assert!(!finish_reasons.contains_key(&index), "text after the end");
                texts.entry(index).or_insert_with(String::new).push_str(&text);
            }
            Event::Finished(v1::Finished { index, finish_reason }) => {
                let earlier = finish_reasons.insert(index, finish_reason);
                assert_eq!(earlier, None, "finished twice");
            }
            Event::Usage(usage) => break usage,
        }
    };
    assert_eq!(next().await?, None, "usage is the last event");
    Ok(Answer { started, texts, finish_reasons, usage })
}

fn check_equal(answer: &Answer, reply: &Reply) {
    let reply = reply.json();
    assert_eq!(answer.texts[&0], whole_text(&reply, 0));
    let finish = reply["choices"][0]["finish_reason"].as_str().unwrap();
    assert_eq!(answer.finish_reasons[&0], finish);
    let usage = &reply["usage"];
    assert_eq!(Some(answer.usage.prompt_tokens), usage["prompt_tokens"].as_u64());
    let completion = usage["completion_tokens"].as_u64();
    assert_eq!(Some(answer.usage.completion_tokens), completion);
}

#[tokio::test]
async fn text_chat_and_token_ids_get_the_answers_that_http_gives() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut client = client(&cluster).await;
    let text = words(40, "a");
    let ids: Vec<u32> = text.bytes().map(|byte| u32::from(byte) + 3).collect();
    let chat = v1::Chat {
        messages: vec![message("system", "Be brief."), message("user", &words(40, "b"))],
    };
    let messages = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": words(40, "b")},
    ]);
    let cases = [
        (Prompt::Text(text.clone()), COMPLETIONS, json!({"prompt": text})),
        (Prompt::Chat(chat), CHAT, json!({"messages": messages})),
        (Prompt::TokenIds(v1::TokenIds { ids: ids.clone() }), COMPLETIONS, json!({"prompt": ids})),
    ];
    for (prompt, path, mut body) in cases {
        body["model"] = "sim".into();
        body["max_tokens"] = 12.into();
        body["temperature"] = 0.into();
        let first = answer(&mut client, generate(prompt.clone())).await.unwrap();
        cluster.settle().await;
        let over_http = cluster.http.post(path, &body).await;
        check_equal(&first, &over_http);
        cluster.settle().await;
        let again = answer(&mut client, generate(prompt)).await.unwrap();
        check_equal(&again, &over_http);
        let cached = over_http.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(again.usage.cached_tokens, cached);
        assert!(cached > Some(0));
        assert_eq!(again.usage.cached_source(), v1::CachedSource::Engine);
        let route = again.started.route.unwrap();
        assert_eq!(route.flow, "prefill_first");
        assert_eq!(route.prefill_worker.as_deref(), over_http.route("prefill"));
        assert!(route.decode_worker.starts_with('d'));
        assert_eq!(
            Some(u64::from(route.overlap_blocks)),
            over_http.route("overlap_blocks").map(|blocks| blocks.parse().unwrap())
        );
    }
    cluster.quiet().await;
}

#[tokio::test]
async fn a_cold_prompt_reports_zero_and_a_missing_figure_follows_the_configuration() {
    let zero = Cluster::start(Spec::default()).await;
    let prompt = Prompt::Text(words(40, "c"));
    let cold = answer(&mut client(&zero).await, generate(prompt.clone())).await;
    let usage = cold.unwrap().usage;
    assert_eq!(usage.cached_tokens, Some(0));
    assert_eq!(usage.cached_source(), v1::CachedSource::Engine);
    for (fallback, source) in
        [("estimate", v1::CachedSource::Estimate), ("omit", v1::CachedSource::Unspecified)]
    {
        let cluster = Cluster::start(Spec {
            model: format!("cached_tokens_fallback: {fallback}"),
            engine: |_, config: &mut SimConfig| config.usage_report = UsageReport::Null,
            ..Spec::aggregated(1)
        })
        .await;
        let mut client = client(&cluster).await;
        answer(&mut client, generate(prompt.clone())).await.unwrap();
        cluster.settle().await;
        let warm = answer(&mut client, generate(prompt.clone())).await.unwrap();
        let estimate = (warm.usage.prompt_tokens - 1) / 16 * 16;
        let told = (fallback == "estimate").then_some(estimate);
        assert_eq!(warm.usage.cached_tokens, told, "{fallback}");
        assert_eq!(warm.usage.cached_source(), source, "{fallback}");
    }
}

#[tokio::test]
async fn parameters_reach_the_engine_under_openais_names() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut client = client(&cluster).await;
    let request = v1::GenerateRequest {
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(9),
            min_tokens: Some(2),
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(40),
            presence_penalty: Some(0.1),
            frequency_penalty: Some(-0.1),
            seed: Some(-7),
            stop: vec!["never ever".into()],
            n: Some(2),
            ignore_eos: Some(true),
        }),
        cache_hit_threshold: Some(0.5),
        cache_salt: Some("s".into()),
        request_id: "mine-1".into(),
        extra_body_json: json!({
            "logit_bias": {"5": 1},
            "kv_transfer_params": {"do_remote_prefill": true},
            "vllm_xargs": {"a": 1, "kv_transfer_params": {"do_remote_prefill": true}},
        })
        .to_string(),
        ..generate(Prompt::Text("hello".into()))
    };
    let two = answer(&mut client, request).await.unwrap();
    assert_eq!(two.texts.len(), 2, "both choices came");
    assert_eq!(two.finish_reasons.len(), 2);
    assert_eq!(two.started.request_id, "mine-1");
    let sent = cluster.engine("w0").requests().pop().unwrap();
    let Value::Object(body) = &sent.body else { panic!("{:?}", sent.body) };
    for (key, value) in [
        ("max_tokens", json!(9)),
        ("min_tokens", json!(2)),
        ("temperature", json!(0.5)),
        ("top_p", json!(0.9)),
        ("top_k", json!(40)),
        ("presence_penalty", json!(0.1)),
        ("frequency_penalty", json!(-0.1)),
        ("seed", json!(-7)),
        ("stop", json!(["never ever"])),
        ("n", json!(2)),
        ("ignore_eos", json!(true)),
        ("cache_salt", json!("s")),
        ("logit_bias", json!({"5": 1})),
        ("vllm_xargs", json!({"a": 1})),
    ] {
        assert_eq!(body.get(key), Some(&value), "{key}");
    }
    assert_eq!(body.get("kv_transfer_params"), None);
    assert_eq!(body.get("cache_hit_threshold"), None);
    assert_ne!(sent.header("x-request-id"), Some("mine-1"));
}

#[tokio::test]
async fn absent_parameters_are_left_to_the_engine() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let request = v1::GenerateRequest {
        model: "sim".into(),
        prompt: Some(Prompt::Text("hello".into())),
        ..Default::default()
    };
    let whole = answer(&mut client(&cluster).await, request).await.unwrap();
    assert!(!whole.started.request_id.is_empty());
    let sent = cluster.engine("w0").requests().pop().unwrap();
    let keys: Vec<_> = sent.body.as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["model", "prompt", "stream", "stream_options"]);
}

#[tokio::test]
async fn mistakes_are_reported_by_status_code_before_any_engine_is_asked() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut client = client(&cluster).await;
    let good = || generate(Prompt::Text("hello".into()));
    let sampling =
        |params: v1::SamplingParams| v1::GenerateRequest { sampling: Some(params), ..good() };
    let extra = |json: &str| v1::GenerateRequest { extra_body_json: json.into(), ..good() };
    let threshold = |value: f64| v1::GenerateRequest { cache_hit_threshold: Some(value), ..good() };
    let cases = [
        (v1::GenerateRequest { model: "nope".into(), ..good() }, Code::NotFound),
        (v1::GenerateRequest { prompt: None, ..good() }, Code::InvalidArgument),
        (generate(Prompt::TokenIds(v1::TokenIds { ids: vec![] })), Code::InvalidArgument),
        (generate(Prompt::Chat(v1::Chat { messages: vec![] })), Code::InvalidArgument),
        (threshold(1.5), Code::InvalidArgument),
        (threshold(-0.5), Code::InvalidArgument),
        (threshold(f64::NAN), Code::InvalidArgument),
        (
            sampling(v1::SamplingParams { n: Some(u32::MAX), ..Default::default() }),
            Code::InvalidArgument,
        ),
        (sampling(v1::SamplingParams { n: Some(0), ..Default::default() }), Code::InvalidArgument),
        (
            sampling(v1::SamplingParams { temperature: Some(f64::INFINITY), ..Default::default() }),
            Code::InvalidArgument,
        ),
        (extra("nonsense"), Code::InvalidArgument),
        (extra("[]"), Code::InvalidArgument),
        (extra(r#"{"a":1,"a":2}"#), Code::InvalidArgument),
        (extra(r#"{"model":"other"}"#), Code::InvalidArgument),
        (extra(r#"{"stream":false}"#), Code::InvalidArgument),
        (extra(r#"{"max_tokens":5}"#), Code::InvalidArgument),
    ];
    for (request, code) in cases {
        let what = format!("{request:?}");
        let status = answer(&mut client, request).await.unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status:?}");
        assert!(!status.message().is_empty(), "{what}");
    }
    let legs = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
    assert_eq!(legs.filter(|leg| leg.path.starts_with("/v1/c")).count(), 0);
    cluster.quiet().await;
}

#[tokio::test]
async fn every_field_with_a_place_of_its_own_must_be_given_there() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut client = client(&cluster).await;
    for field in [
        "model",
        "prompt",
        "messages",
        "cache_hit_threshold",
        "cache_salt",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "n",
        "ignore_eos",
        "logprobs",
    ] {
        let request = v1::GenerateRequest {
            extra_body_json: json!({ field: 1 }).to_string(),
            ..generate(Prompt::Text("hello".into()))
        };
        match answer(&mut client, request).await {
            Ok(_) => panic!("{field} was taken from extra_body_json"),
            Err(status) => assert_eq!(status.code(), Code::InvalidArgument, "{field}"),
        }
    }
}

#[tokio::test]
async fn failures_of_engines_are_reported_by_status_code() {
    let spec = Spec {
        model: "retries: { prefill: 0, decode: 0 }\ntimeouts: { first_token: 3s }".into(),
        ..Spec::aggregated(1)
    };
    let cluster = Cluster::start(spec).await;
    let mut client = client(&cluster).await;
    let request = || generate(Prompt::Text(words(30, "f")));
    let cases = [
        (FaultKind::Status { status: 429 }, Code::ResourceExhausted),
        (FaultKind::Status { status: 400 }, Code::InvalidArgument),
        (FaultKind::Hang, Code::DeadlineExceeded),
        (FaultKind::Status { status: 503 }, Code::Unavailable),
        (FaultKind::Reset, Code::Unavailable),
    ];
    for (kind, code) in cases {
        let what = format!("{kind:?}");
        // Without a count, because a trial of the worker would take a fault of this request.
        cluster.engine("w0").set_fault(Fault { kind, times: None });
        let status = answer(&mut client, request()).await.unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status:?}");
        cluster.engine("w0").clear_faults();
        cluster.quiet().await;
    }
    // In mid-stream: what arrived stands, and the end is an error.
    cluster
        .engine("w0")
        .set_fault(Fault { kind: FaultKind::DieMidStream { after_chunks: 4 }, times: None });
    let mut events = client.generate(request()).await.unwrap().into_inner();
    let mut deltas = 0;
    let status = loop {
        match events.message().await {
            Ok(Some(event)) => deltas += u32::from(matches!(event.event, Some(Event::Delta(_)))),
            Ok(None) => panic!("a broken answer looks complete"),
            Err(status) => break status,
        }
    };
    assert!(deltas > 0);
    let broken_off = [Code::Aborted, Code::Internal, Code::Unavailable];
    assert!(broken_off.contains(&status.code()), "{status:?}");
    cluster.quiet().await;
}

/// Sends a call's body in these pieces; gives its status, and how many bytes the answer has.
async fn call_of(cluster: &Cluster, pieces: Vec<Bytes>) -> (String, usize) {
    let frames =
        pieces.into_iter().map(|piece| Ok::<_, std::convert::Infallible>(Frame::data(piece)));
    let http: Hyper<HttpConnector, _> =
        Hyper::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
    let address = cluster.running.addresses.grpc.unwrap();
    let request =
        http::Request::post(format!("http://{address}/splitrail.v1.FrontDoorService/Generate"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(StreamBody::new(stream::iter(frames)))
            .unwrap();
    let reply = http.request(request).await.unwrap();
    assert_eq!(reply.status(), 200);
    assert_eq!(reply.headers()["content-type"], "application/grpc");
    let from_head = reply.headers().get("grpc-status").cloned();
    let body = reply.into_body().collect().await.unwrap();
    let from_end = body.trailers().and_then(|trailers| trailers.get("grpc-status").cloned());
    let status = from_head.or(from_end).expect("a status");
    (status.to_str().unwrap().to_owned(), body.to_bytes().len())
}

#[tokio::test]
async fn a_message_is_read_in_any_form_and_an_invalid_one_is_reported() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let encoded = generate(Prompt::Text(words(2000, "p"))).encode_to_vec();
    let prefix = [&[0][..], &(encoded.len() as u32).to_be_bytes()].concat();
    let whole = Bytes::from([prefix, encoded].concat());
    let cut = |at: usize| vec![whole.slice(..at), whole.slice(at..)];
    for pieces in [
        vec![whole.clone()],
        cut(1),
        cut(4),
        cut(5),
        cut(6),
        cut(whole.len() - 1),
        whole.chunks(1000).map(|piece| whole.slice_ref(piece)).collect(),
    ] {
        let (status, bytes) = call_of(&cluster, pieces).await;
        assert!(status == "0" && bytes > 0, "{status}");
        let sent = cluster.engine("w0").requests().pop().unwrap();
        assert_eq!(sent.body["prompt"], words(2000, "p"));
    }
    let served = cluster.engine("w0").requests().len();
    let flagged = |flag: u8| Bytes::from([&[flag][..], &whole[1..]].concat());
    for (what, body) in [
        ("nothing", Bytes::new()),
        ("a part of a prefix", whole.slice(..3)),
        ("a prefix", whole.slice(..5)),
        ("a part of a message", whole.slice(..whole.len() - 1)),
        ("a part of a second", [&whole[..], &whole[..9]].concat().into()),
        ("a second", [&whole[..], &whole[..]].concat().into()),
        ("a short second", [&whole[..], &[0, 0, 0, 0, 1, 9][..]].concat().into()),
        ("a compressed one", flagged(1)),
        ("an unknown flag", flagged(2)),
        ("no message", Bytes::from_static(&[0, 0, 0, 0, 2, 0xff, 0xff])),
    ] {
        let internal = (Code::Internal as i32).to_string();
        assert_eq!(call_of(&cluster, vec![body]).await, (internal, 0), "{what}");
    }
    assert_eq!(cluster.engine("w0").requests().len(), served);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_client_that_cancels_frees_everything() {
    let cluster = Cluster::start(Spec {
        engine: |_, config: &mut SimConfig| config.decode_us_per_step = 5_000,
        ..Spec::default()
    })
    .await;
    let mut client = client(&cluster).await;
    let mut request = generate(Prompt::Text(words(40, "g")));
    request.sampling.as_mut().unwrap().max_tokens = Some(20_000);
    let mut events = client.generate(request).await.unwrap().into_inner();
    for _ in 0..4 {
        events.message().await.unwrap().unwrap();
    }
    assert_eq!(cluster.metric("splitrail_requests_in_flight", &[]).await, 1.0);
    drop(events);
    cluster.quiet().await;
    eventually("no engine holds a block for it", async || {
        let mut engines = cluster.engines.iter();
        engines.all(|(_, engine)| engine.state().blocks_used == 0)
    })
    .await;
    let cancelled = [("outcome", "cancelled")];
    assert_eq!(cluster.metric("splitrail_requests_total", &cancelled).await, 1.0);
}

#[tokio::test]
async fn models_are_listed_with_their_other_names() {
    let cluster = Cluster::start(Spec {
        model: "adapters: [my-lora]".into(),
        engine: |_, config: &mut SimConfig| config.adapters = vec!["my-lora".into()],
        ..Spec::default()
    })
    .await;
    let mut client = client(&cluster).await;
    let listed = client.list_models(v1::ListModelsRequest {}).await.unwrap();
    let expected = v1::Model {
        name: "sim".into(),
        aliases: vec!["default".into()],
        adapters: vec!["my-lora".into()],
        block_size: 16,
    };
    assert_eq!(listed.into_inner().models, [expected]);
    for name in ["default", "my-lora"] {
        let request =
            v1::GenerateRequest { model: name.into(), ..generate(Prompt::Text("hello".into())) };
        answer(&mut client, request).await.unwrap();
    }
}

async fn check(health: &mut HealthClient<Channel>, service: &str) -> Result<ServingStatus, Status> {
    let request = HealthCheckRequest { service: service.into() };
    Ok(health.check(request).await?.into_inner().status())
}

#[tokio::test]
async fn health_agrees_with_ready_and_a_watch_sees_the_drain() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut health = HealthClient::new(channel(&cluster).await);
    let services = ["", "splitrail.v1.FrontDoorService"];
    for service in services {
        assert_eq!(check(&mut health, service).await.unwrap(), ServingStatus::Serving);
    }
    assert_eq!(cluster.http.get("/ready").await.status, 200);
    let unknown = check(&mut health, "nobody").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let request = HealthCheckRequest::default();
    let mut watch = health.watch(request).await.unwrap().into_inner();
    let status = |seen: HealthCheckResponse| seen.status();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(status(first), ServingStatus::Serving);
    cluster.running.core.drain();
    assert_eq!(cluster.http.get("/ready").await.status, 503);
    for service in services {
        assert_eq!(check(&mut health, service).await.unwrap(), ServingStatus::NotServing);
    }
    let second = watch.message().await.unwrap().unwrap();
    assert_eq!(status(second), ServingStatus::NotServing);
}

#[tokio::test]
async fn a_watch_ends_with_the_drain_and_a_stream_may_finish() {
    let cluster = Cluster::start(Spec {
        engine: |_, config: &mut SimConfig| config.decode_us_per_step = 3_000,
        ..Spec::default()
    })
    .await;
    let mut health = HealthClient::new(channel(&cluster).await);
    let watch = health.watch(HealthCheckRequest::default()).await.unwrap();
    let mut watch = watch.into_inner();
    let mut client = client(&cluster).await;
    let mut request = generate(Prompt::Text(words(40, "h")));
    request.sampling.as_mut().unwrap().max_tokens = Some(150);
    let mut events = client.generate(request).await.unwrap().into_inner();
    events.message().await.unwrap().unwrap();
    let Cluster { running, engines, .. } = cluster;
    let client = async {
        let mut last = None;
        while let Some(event) = events.message().await.unwrap() {
            last = event.event;
        }
        assert!(matches!(last, Some(Event::Usage(_))), "cut off: {last:?}");
        while let Ok(Some(_)) = watch.message().await {}
    };
    let (cut, ()) = tokio::join!(running.drain(), client);
    assert_eq!(cut, 0);
    drop(engines);
}

#[tokio::test]
async fn reflection_lists_the_services_and_describes_the_front_door() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut client = ServerReflectionClient::new(channel(&cluster).await);
    let ask = |message: MessageRequest| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message),
    };
    let questions = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("splitrail.v1.FrontDoorService".into())),
    ];
    let replies = client.server_reflection_info(stream::iter(questions)).await;
    let mut replies = replies.unwrap().into_inner();
    let mut next = async || replies.message().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = next().await else {
        panic!("no list of services");
    };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    for service in ["splitrail.v1.FrontDoorService", "grpc.health.v1.Health"] {
        assert!(names.contains(&service.to_owned()), "{service} in {names:?}");
    }
    let Some(MessageResponse::FileDescriptorResponse(files)) = next().await else {
        panic!("no description of the front door");
    };
    let text = String::from_utf8_lossy(&files.file_descriptor_proto[0]).into_owned();
    assert!(text.contains("GenerateRequest"));
}
