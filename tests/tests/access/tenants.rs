//! What a tenant may use.

use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::grpc_client;
use splitrail_tests::tenants::{Keys, bearer, complete, start};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};

#[tokio::test]
async fn a_tenant_uses_and_sees_its_models_only() {
    let mut keys = Keys::empty();
    let [all, some] = ["all", "some"].map(|name| keys.tenant(name));
    let tenants = "tenants: [ { name: all }, { name: some, models: [default] } ]";
    let cluster = start(&keys, tenants, Spec::aggregated(1)).await;
    let names = async |key: &str| {
        let authorization = bearer(key);
        let headers = [("authorization", authorization.as_str())];
        let listed = cluster.http.get_with("/v1/models", &headers).await.json();
        let ids = listed["data"].as_array().unwrap().iter().map(|model| model["id"].clone());
        let shown = cluster.http.get_with("/v1/models/sim", &headers).await.status.as_u16();
        (ids.collect::<Value>(), shown)
    };
    assert_eq!(names(&all).await, (json!(["default", "sim"]), 200));
    assert_eq!(names(&some).await, (json!(["default"]), 403));
    let authorization = bearer(&some);
    let headers = [("authorization", authorization.as_str())];
    let alias = cluster.http.get_with("/v1/models/default", &headers).await;
    let listed = cluster.http.get_with("/v1/models", &headers).await;
    for reply in [alias, listed] {
        assert!(!reply.text().contains("sim"), "the name of its model: {}", reply.text());
    }
    let mut client = grpc_client(cluster.running.addresses.grpc.unwrap());
    for (key, name, aliases) in
        [(&all, "sim", vec!["default".to_owned()]), (&some, "default", Vec::new())]
    {
        let mut call = tonic::Request::new(v1::ListModelsRequest {});
        call.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
        let listed = client.list_models(call).await.unwrap().into_inner();
        let [model] = &listed.models[..] else { panic!("{listed:?}") };
        assert_eq!((model.name.as_str(), &model.aliases), (name, &aliases));
    }
    let mut body = completion(&prompt(8, "a"));
    let refused = complete(&cluster.http, &some, &body).await;
    assert_eq!(refused.status, 403, "{}", refused.text());
    assert_eq!(refused.json()["error"]["code"], "permission_denied");
    assert_eq!(refused.json()["error"]["param"], "model");
    body["model"] = json!("nope");
    let unknown = complete(&cluster.http, &some, &body).await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("known: default\""), "no others: {}", unknown.text());
    body["model"] = json!("default");
    assert_eq!(complete(&cluster.http, &some, &body).await.status, 200);
}

#[tokio::test]
async fn a_tenant_has_at_most_its_requests_in_flight() {
    let mut keys = Keys::empty();
    let [small, other] = ["small", "other"].map(|name| keys.tenant(name));
    let tenants =
        "tenants: [ { name: small, limits: { requests_in_flight: 1 } }, { name: other } ]";
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let cluster = start(&keys, tenants, spec).await;
    let long = json!({"model": "sim", "max_tokens": 400, "prompt": "a b c", "stream": true});
    let authorization = bearer(&small);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = cluster.http.stream_with(COMPLETIONS, &headers, &long).await;
    stream.next().await.unwrap();
    let short = completion(&prompt(8, "a"));
    let refused = complete(&cluster.http, &small, &short).await;
    assert_eq!(refused.status, 429);
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("requests"), &json!("rate_limit_exceeded"))
    );
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(complete(&cluster.http, &other, &short).await.status, 200);
    let batch = json!({"model": "sim", "max_tokens": 1, "prompt": ["a", "b"]});
    let never = complete(&cluster.http, &small, &batch).await;
    assert_eq!(never.status, 429);
    drop(stream);
    eventually("the place is free again", async || {
        complete(&cluster.http, &small, &short).await.status == 200
    })
    .await;
    let never = complete(&cluster.http, &small, &batch).await;
    assert_eq!(never.header("x-should-retry"), "false", "two prompts never fit: {}", never.text());
}

#[tokio::test]
async fn requests_without_a_key_are_those_of_the_default_tenant() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let tenants = "tenants: [ { name: acme }, { name: anonymous, models: [default] } ]
defaults: { tenant: anonymous }";
    let cluster = start(&keys, tenants, Spec::aggregated(1)).await;
    let mut body = completion(&prompt(8, "a"));
    assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 403);
    assert_eq!(complete(&cluster.http, &key, &body).await.status, 200);
    body["model"] = json!("default");
    assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
    assert_eq!(
        complete(&cluster.http, "sr-wrong", &body).await.status,
        401,
        "a wrong key is wrong"
    );
}

#[tokio::test]
async fn a_reload_changes_tenants_and_keeps_what_is_in_flight() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let tenants = "tenants: [ { name: acme, limits: { requests_in_flight: 5 } } ]";
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let cluster = start(&keys, tenants, spec).await;
    let long = json!({"model": "sim", "max_tokens": 400, "prompt": "a b c", "stream": true});
    let authorization = bearer(&key);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = cluster.http.stream_with(COMPLETIONS, &headers, &long).await;
    stream.next().await.unwrap();
    let yaml = cluster.yaml.replace("requests_in_flight: 5", "requests_in_flight: 1");
    let reloaded = cluster.reload(&yaml).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    let short = completion(&prompt(8, "a"));
    assert_eq!(complete(&cluster.http, &key, &short).await.status, 429);
    drop(stream);
    eventually("the place is free again", async || {
        complete(&cluster.http, &key, &short).await.status == 200
    })
    .await;
}
