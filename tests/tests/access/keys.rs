//! API keys: which are accepted, how others are refused, and how keys change while the router runs.

use futures_util::stream;
use serde_json::json;
use splitrail_config::keys::OperatorRole;
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::MESSAGES;
use splitrail_tests::grpc::grpc_client;
use splitrail_tests::tenants::{Keys, bearer, complete, start};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

const TENANTS: &str = "tenants: [ { name: acme } ]";

#[tokio::test]
async fn a_request_needs_a_valid_key() {
    let mut keys = Keys::empty();
    let (key, expired) = (keys.tenant("acme"), keys.expired("acme"));
    let admin = keys.role(OperatorRole::Admin);
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let body = completion(&prompt(8, "a"));
    for header in [("authorization", bearer(&key)), ("x-api-key", key.clone())] {
        let headers = [(header.0, header.1.as_str())];
        let reply = cluster.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let before = cluster.engine("w0").requests().len();
    for (credential, status, code) in [
        (None, 401, "invalid_api_key"),
        (Some(""), 401, "invalid_api_key"),
        (Some("sr-wrong"), 401, "invalid_api_key"),
        (Some(&key[..key.len() - 1]), 401, "invalid_api_key"),
        (Some(&expired), 401, "invalid_api_key"),
        (Some(&admin), 403, "permission_denied"),
    ] {
        let bearer = credential.map(bearer).unwrap_or_default();
        let headers: &[_] =
            if credential.is_some() { &[("authorization", bearer.as_str())] } else { &[] };
        let reply = cluster.http.post_with(COMPLETIONS, headers, body.to_string()).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (status, &json!(code)));
        let challenge = if status == 401 { "Bearer" } else { "" };
        assert_eq!(reply.header("www-authenticate"), challenge);
        assert!(!reply.header("x-request-id").is_empty());
        let listed = cluster.http.get_with("/v1/models", headers).await;
        assert_eq!(listed.status.as_u16(), status, "{}", listed.text());
    }
    assert_eq!(cluster.engine("w0").requests().len(), before, "no engine was asked");
    let (good, bad) = (bearer(&key), "sr-wrong");
    let bad_bearer = bearer(bad);
    for (headers, named) in [
        (&[("authorization", bad_bearer.as_str())][..], "in `authorization: Bearer` is not valid"),
        (&[("authorization", bad)], "write `Bearer ` before the key"),
        (&[("x-api-key", bad)], "in `x-api-key` is not valid"),
        (&[("authorization", &bad_bearer), ("x-api-key", &key)], "`x-api-key` counts only without"),
        (&[("api-key", &key)], "send `authorization: Bearer KEY` or `x-api-key: KEY`"),
    ] {
        let reply = cluster.http.post_with(COMPLETIONS, headers, body.to_string()).await;
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(reply.status == 401 && message.contains(named), "{message}");
        assert!(!message.contains(bad), "{message}");
    }
    let placeholder = [("authorization", good.as_str()), ("x-api-key", bad)];
    let reply = cluster.http.post_with(COMPLETIONS, &placeholder, body.to_string()).await;
    assert_eq!(reply.status, 200, "`authorization` has precedence");
    let refused = |reason| cluster.metric("splitrail_refused_credentials_total", reason);
    assert_eq!(refused(&[("listener", "http"), ("reason", "expired")]).await, 2.0);
    assert_eq!(refused(&[("listener", "http"), ("reason", "missing")]).await, 3.0);
}

#[tokio::test]
async fn health_checks_need_no_key() {
    let keys = Keys::empty();
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    for path in ["/health", "/ready"] {
        assert_eq!(cluster.http.get(path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn each_api_refuses_in_its_own_form() {
    let keys = Keys::empty();
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let message = json!({
        "model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}],
    });
    let reply = cluster.http.post_with(MESSAGES, &[("x-api-key", "no")], message.to_string()).await;
    assert_eq!(reply.status, 401);
    assert_eq!(reply.json()["type"], "error");
    assert_eq!(reply.json()["error"]["type"], "authentication_error");
    let mut grpc = grpc_client(cluster.running.addresses.grpc.unwrap());
    let status = grpc.list_models(splitrail_proto::v1::ListModelsRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
}

#[tokio::test]
async fn the_definitions_of_the_grpc_api_need_a_key() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let address = format!("http://{}", cluster.running.addresses.grpc.unwrap());
    let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    let mut reflection = ServerReflectionClient::new(channel);
    for (key, code) in [(None, Some(Code::Unauthenticated)), (Some(key), None)] {
        let list = Some(MessageRequest::ListServices(String::new()));
        let question = ServerReflectionRequest { host: String::new(), message_request: list };
        let mut call = tonic::Request::new(stream::iter([question]));
        key.map(|key| call.metadata_mut().insert("authorization", bearer(&key).parse().unwrap()));
        let refused = reflection.server_reflection_info(call).await.err();
        assert_eq!(refused.map(|status| status.code()), code);
    }
}

#[tokio::test]
async fn a_key_is_revoked_while_its_stream_runs() {
    let mut keys = Keys::empty();
    let (old, new) = (keys.tenant("acme"), keys.tenant("acme"));
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let cluster = start(&keys, TENANTS, spec).await;
    let body = json!({"model": "sim", "max_tokens": 200, "prompt": "a b c", "stream": true});
    let headers = bearer(&old);
    let headers = [("authorization", headers.as_str())];
    let mut stream = cluster.http.stream_with(COMPLETIONS, &headers, &body).await;
    stream.next().await.unwrap();
    keys.revoke(0);
    let short = completion(&prompt(8, "a"));
    eventually("the revoked key is refused", async || {
        complete(&cluster.http, &old, &short).await.status == 401
    })
    .await;
    assert_eq!(complete(&cluster.http, &new, &short).await.status, 200, "its successor is valid");
    let rest = stream.rest().await;
    assert_eq!(rest.last().map(String::as_str), Some("[DONE]"), "the stream ends at its end");
}

#[tokio::test]
async fn a_key_file_that_cannot_be_used_changes_nothing() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let good = std::fs::read_to_string(keys.path()).unwrap();
    let body = completion(&prompt(8, "a"));
    for broken in ["", "keys: nonsense", "\u{0}"] {
        std::fs::write(keys.path(), broken).unwrap();
        // Long enough for the router to look at the file again.
        tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
        assert_eq!(complete(&cluster.http, &key, &body).await.status, 200, "{broken:?}");
        let reply = cluster.reload(&cluster.yaml).await;
        assert_eq!(reply.status, 422, "a reload says why: {}", reply.text());
    }
    std::fs::write(keys.path(), good).unwrap();
    assert_eq!(cluster.reload(&cluster.yaml).await.status, 200);
    assert_eq!(complete(&cluster.http, &key, &body).await.status, 200);
}

#[tokio::test]
async fn without_auth_everyone_may_use_the_engines_and_credentials_are_ignored() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let reply = complete(&cluster.http, "sk-anything", &completion(&prompt(8, "a"))).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[tokio::test]
async fn a_reply_before_a_long_body_is_read_says_that_the_connection_ends() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let spec = Spec { limits: "{ body_size_max: 100000 }", ..Spec::aggregated(1) };
    let cluster = start(&keys, TENANTS, spec).await;
    let long = |bytes: usize| completion(&"x".repeat(bytes));
    for (key, bytes, status) in
        [("sr-wrong", 100, 401), ("sr-wrong", 50_000, 401), (&key, 200_000, 413)]
    {
        for _ in 0..20 {
            let reply = complete(&cluster.http, key, &long(bytes)).await;
            assert_eq!(reply.status.as_u16(), status);
            let told = if bytes > 10_000 { "close" } else { "" };
            assert_eq!(reply.header("connection"), told, "{bytes} bytes");
        }
    }
}
