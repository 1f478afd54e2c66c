//! Flows that a request asks for, and what `decode_only` tells.

use http::StatusCode;
use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_proto::v1::generate_response::Event;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::trial::{CHAT, COMPLETIONS, Reference, prompt};
use splitrail_tests::{Reply, Spec, Trial};

use super::support::*;

const FLOW: &str = "x-splitrail-flow";

async fn ask(trial: &mut Trial, path: &str, flow: &str, body: &Value) -> Reply {
    trial.expect("ok");
    trial.cluster.http.post_with(path, &[(FLOW, flow)], body.to_string()).await
}

#[tokio::test]
async fn a_request_gets_the_flow_it_asks_for_where_that_is_allowed() {
    let model = "request_flows: [aggregated, decode_first, decode_only, auto]\n\
                 gate: { kind: engine, index_first: false }";
    let spec = Spec { prefill: 1, decode: 1, model: model.into(), ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let reference = Reference::start().await;
    for (turn, (flow, executed)) in [
        ("aggregated", "aggregated"),
        ("prefill_first", "prefill_first"),
        ("decode_first", "decode_first"),
        ("decode_only", "decode_only"),
        ("auto", "decode_first"),
    ]
    .into_iter()
    .enumerate()
    {
        // The threshold 0 is met by every worker.
        let body = body(0, 200 + turn, Some(0.0));
        let reply = ask(&mut trial, COMPLETIONS, flow, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("flow"), Some(executed), "asked for {flow}");
        assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
    }
    let flows = [("flow", "decode_only"), ("outcome", "ok")];
    assert_eq!(trial.cluster.metric("splitrail_requests_total", &flows).await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_flow_that_the_model_does_not_allow_is_refused_by_name() {
    let mut trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    for flow in ["aggregated", "decode_first", "decode_only", "auto", "sideways", ""] {
        trial.expect("invalid_request");
        let body = body(0, 100, None).to_string();
        let reply = trial.cluster.http.post_with(COMPLETIONS, &[(FLOW, flow)], body).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{flow}");
        assert_eq!(reply.json()["error"]["param"], FLOW, "{}", reply.text());
    }
    assert_eq!(trial.counts(["p0", "d0"]), [0, 0]);
    let own = ask(&mut trial, COMPLETIONS, "prefill_first", &body(0, 100, None)).await;
    assert_eq!(own.status, 200, "the model's own flow needs no leave");
    trial.finish().await;
}

#[tokio::test]
async fn decode_only_tells_the_client_that_too_little_is_cached() {
    for gate in ["{ kind: engine, index_first: false }", "{ kind: router }"] {
        let model = format!("request_flows: [decode_only]\ngate: {gate}");
        let spec = Spec { prefill: 1, decode: 1, model, ..Spec::default() };
        let mut trial = Trial::start(spec).await;
        let reference = Reference::start().await;
        for path in [CHAT, COMPLETIONS] {
            let mut body = text_body(path, &prompt(30, "only"), 0.5);
            body["n"] = 2.into();
            let reply = ask(&mut trial, path, "decode_only", &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            let told = reply.json();
            let choices = told["choices"].as_array().unwrap();
            assert_eq!(choices.len(), 2);
            for (i, choice) in choices.iter().enumerate() {
                assert_eq!(
                    (&choice["index"], &choice["finish_reason"]),
                    (&json!(i), &json!("cache_threshold"))
                );
                assert_eq!(whole_text(&told, i), "");
            }
            assert_eq!(told["usage"]["completion_tokens"], 0);
            assert_eq!(told["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
            let prompt_tokens = told["usage"]["prompt_tokens"].clone();

            (body["stream"], body["n"]) = (true.into(), 1.into());
            body["stream_options"] = json!({"include_usage": true});
            let chunks = streamed_only(&mut trial, path, &body).await;
            assert_eq!(chunks[0]["choices"][0]["finish_reason"], "cache_threshold");
            assert_eq!(streamed_text(&chunks, 0), "");
            assert_eq!(chunks[1]["usage"]["prompt_tokens"], prompt_tokens);
            assert_eq!(chunks.len(), 2);

            // Once it is there, it is served.
            (body["stream"], body["cache_hit_threshold"]) = (false.into(), json!(0.0));
            body.as_object_mut().unwrap().remove("stream_options");
            ask(&mut trial, path, "decode_only", &body).await;
            trial.cluster.settle().await;
            body["cache_hit_threshold"] = json!(0.5);
            let served = ask(&mut trial, path, "decode_only", &body).await;
            assert_eq!(whole_text(&served.json(), 0), reference.text(path, &body).await);
            assert_eq!(tried(&served).1, "served");
        }
        assert_eq!(trial.counts(["p0"]), [0]);
        trial.finish().await;
    }
}

/// A stream of `decode_only`, up to `[DONE]`.
async fn streamed_only(trial: &mut Trial, path: &str, body: &Value) -> Vec<Value> {
    let reply = ask(trial, path, "decode_only", body).await;
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let text = reply.text();
    let mut events: Vec<_> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
    let data = events.iter().map(|event| event.strip_prefix("data: ").unwrap());
    data.map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[tokio::test]
async fn grpc_takes_flow_and_threshold_as_http_does() {
    let model = "request_flows: [decode_only]\ngate: { kind: engine, index_first: false }";
    let spec = Spec { prefill: 1, decode: 1, model: model.into(), ..Spec::default() };
    let trial = Trial::start(spec).await;
    let mut client = grpc_client(trial.cluster.running.addresses.grpc.unwrap());
    let message = v1::GenerateRequest {
        cache_hit_threshold: Some(0.5),
        ..text_request(&prompt(30, "grpc"), "")
    };
    let mut request = tonic::Request::new(message.clone());
    request.metadata_mut().insert(FLOW, "decode_only".parse().unwrap());
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut events = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        events.extend(response.event);
    }
    let [Event::Started(started), Event::Finished(finished), Event::Usage(usage)] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!(started.route.as_ref().unwrap().flow, "decode_only");
    assert_eq!(finished.finish_reason, "cache_threshold");
    assert_eq!((usage.completion_tokens, usage.cached_tokens), (0, Some(0)));
    let mut refused = tonic::Request::new(message);
    refused.metadata_mut().insert(FLOW, "auto".parse().unwrap());
    let status = client.generate(refused).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert_eq!(trial.counts(["p0"]), [0]);
}
