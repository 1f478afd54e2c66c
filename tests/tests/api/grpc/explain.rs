//! The call `Explain`.

use super::*;

fn explain_request(subject: Subject) -> v1::ExplainRequest {
    v1::ExplainRequest { subject: Some(subject) }
}

#[tokio::test]
async fn explain_is_refused_until_an_operator_allows_it() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut client = client(&cluster).await;
    for subject in [
        Subject::RequestId("anybody's".into()),
        Subject::Request(generate(Prompt::Text(words(40, "x")))),
    ] {
        let status = client.explain(explain_request(subject)).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied);
        assert!(status.message().contains("listen.grpc_explain"), "{status:?}");
    }
}

/// The same without what changes from one moment to the next.
fn without_ages(mut told: Value) -> Value {
    match &mut told {
        Value::Object(members) => {
            members.remove("index_age_ms");
            members.values_mut().for_each(|value| *value = without_ages(value.take()));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = without_ages(item.take())),
        _ => {}
    }
    told
}

#[tokio::test]
async fn explain_says_what_the_admin_listener_says() {
    let spec = Spec { prefill: 1, decode: 1, grpc_explain: true, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let mut client = client(&cluster).await;
    let prompt = words(40, "secret");
    let mut request = generate(Prompt::Text(prompt.clone()));
    request.request_id = "ask-me".into();
    answer(&mut client, request.clone()).await.unwrap();
    cluster.settle().await;
    let mut told = async |subject| {
        let told = client.explain(explain_request(subject)).await?.into_inner().explanation_json;
        assert!(!told.contains("secret"), "{told}");
        Ok::<Value, Status>(serde_json::from_str(&told).unwrap())
    };
    let json = [("content-type", "application/json")];
    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 12, "stream": true});
    let dry = cluster.admin.post_with("/admin/explain", &json, body.to_string()).await.json();
    let over_grpc = told(Subject::Request(request)).await.unwrap();
    assert_eq!(without_ages(over_grpc), without_ages(dry));
    let past = cluster.admin.post_with("/admin/explain?request_id=ask-me", &json, "").await.json();
    assert_eq!(told(Subject::RequestId("ask-me".into())).await.unwrap(), past);
    let engines = cluster.engines.iter().flat_map(|(_, engine)| engine.requests());
    let legs = engines.filter(|leg| leg.path == COMPLETIONS).count();
    assert_eq!(legs, 2, "what is explained is not served");
    let unknown = told(Subject::RequestId("nobody's".into())).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(unknown.message().contains("limits.decisions_kept"));
    let nothing = client.explain(v1::ExplainRequest { subject: None }).await.unwrap_err();
    assert_eq!(nothing.code(), Code::InvalidArgument);
    let bad = v1::GenerateRequest { model: "other".into(), ..generate(Prompt::Text("x".into())) };
    let bad = client.explain(explain_request(Subject::Request(bad))).await.unwrap_err();
    assert_eq!(bad.code(), Code::NotFound);
}
