//! What compares, classifies and pools texts: scores, reranking, classes and pools. One worker does
//! it whole, as with embeddings.

use serde_json::{Value, json};
use splitrail_sim::RecordedRequest;
use splitrail_tests::Spec;
use splitrail_tests::client::{Client, Reply};
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::Solo;
use splitrail_tests::tenants::{Keys, bearer, start};
use splitrail_tests::trial::{Trial, error_of};

/// So many engines that pool, and take turns.
fn pooling(workers: usize) -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        engine: |_, config| config.embeds = true,
        ..Spec::aggregated(workers)
    }
}

/// Each path with its name in metrics, and a body with its tokens.
fn cases() -> Vec<(&'static str, &'static str, Value, u64)> {
    let score = json!({"model": "sim", "text_1": "ab", "text_2": ["c", "de"]});
    let pairs = json!({"model": "sim", "queries": ["a", "b"], "documents": ["c", "de"]});
    let rerank = json!({"model": "sim", "query": "ab", "documents": ["c", "de", "f"], "top_n": 2});
    let input = json!({"model": "sim", "input": ["hello", "you"]});
    vec![
        ("/v1/score", "score", score, 7),
        ("/score", "score", pairs, 5),
        ("/v1/rerank", "rerank", rerank.clone(), 10),
        ("/v2/rerank", "rerank", rerank.clone(), 10),
        ("/rerank", "rerank", rerank, 10),
        ("/classify", "classify", input.clone(), 8),
        ("/pooling", "pooling", input, 8),
    ]
}

/// The requests that an engine got at a path.
fn asked(trial: &Trial, engine: &str, path: &str) -> Vec<RecordedRequest> {
    let requests = trial.cluster.engine(engine).requests();
    requests.into_iter().filter(|request| request.path == path).collect()
}

/// The same request, to the engine itself.
async fn directly(trial: &Trial, path: &str, body: &Value) -> Reply {
    let url = trial.cluster.engine("w0").url();
    let address = url.strip_prefix("http://").unwrap().parse().unwrap();
    Client::new(address).post(path, body).await
}

#[tokio::test]
async fn scores_ranks_classes_and_pools_are_the_engines_own_and_counted() {
    let trial = &mut Trial::start(pooling(1)).await;
    let mut all = 0;
    for (path, name, body, tokens) in cases() {
        let id = format!("at{}", path.replace('/', "-"));
        trial.expect("ok");
        let headers = [("x-request-id", id.as_str())];
        let reply = trial.cluster.http.post_with(path, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        let (told, own) = (reply.json(), directly(trial, path, &body).await.json());
        for member in ["data", "results", "usage", "model", "object"] {
            assert_eq!(told[member], own[member], "{path} {member}");
        }
        assert!(told["data"].is_array() || told["results"].is_array(), "{told}");
        assert_eq!(told["usage"]["prompt_tokens"], tokens, "{path}");
        assert_eq!((reply.route("flow"), reply.route("decode")), (Some("aggregated"), Some("w0")));
        all += tokens;
        let decision = &trial.cluster.decisions(&id).await[0];
        assert_eq!(
            (&decision["outcome"], &decision["decode_worker"]),
            (&json!("ok"), &json!("w0"))
        );
        let labels = [("endpoint", name)];
        assert!(trial.cluster.metric("splitrail_requests_total", &labels).await >= 1.0, "{name}");
    }
    let counted = trial.cluster.metric("splitrail_prompt_tokens_total", &[]).await;
    assert_eq!((counted as u64, all), (58, 58));
    trial.check().await;
}

#[tokio::test]
async fn an_alias_is_replaced_and_what_only_the_router_may_say_is_removed() {
    let trial = &mut Trial::start(pooling(1)).await;
    for (path, _, body, _) in cases() {
        let mut meddling = body.clone();
        meddling["model"] = "default".into();
        meddling["kv_transfer_params"] = json!({"do_remote_prefill": true});
        meddling["request_id"] = "mine".into();
        meddling["priority"] = (-9).into();
        let reply = trial.post("ok", path, &meddling).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        let removed = reply.header("x-splitrail-removed-fields");
        assert_eq!(removed, "kv_transfer_params, request_id, priority", "{path}");
        assert_eq!(asked(trial, "w0", path).pop().unwrap().body, body, "{path}");
    }
    trial.check().await;
}

#[tokio::test]
async fn workers_that_lack_a_path_are_remembered_and_others_asked() {
    let spec = Spec { engine: |name, config| config.embeds = name == "w2", ..pooling(3) };
    let trial = &mut Trial::start(spec).await;
    for (path, _, body, _) in cases() {
        for _ in 0..4 {
            assert_eq!(trial.post("ok", path, &body).await.route("decode"), Some("w2"), "{path}");
        }
        assert!(["w0", "w1"].iter().all(|lacking| asked(trial, lacking, path).len() <= 1));
    }
    trial.check().await;
}

#[tokio::test]
async fn engines_that_generate_do_not_offer_them() {
    let trial = &mut Trial::start(Spec::aggregated(2)).await;
    for (path, _, body, _) in cases() {
        let reply = trial.post("not_offered", path, &body).await;
        let error = reply.json();
        assert_eq!(
            (reply.status.as_u16(), &error_of(&error)["code"]),
            (404, &json!("not_offered"))
        );
    }
    trial.check().await;
}

#[tokio::test]
async fn a_mistake_is_named_before_an_engine_is_asked() {
    let limits = "{ drain_delay: 1ms, embedding_inputs_max: 2 }";
    let trial = &mut Trial::start(Spec { limits, ..pooling(1) }).await;
    for (path, body, param) in [
        ("/score", json!({"text_1": "a", "text_2": "b"}), "model"),
        ("/score", json!({"model": "sim", "text_1": "a"}), "text_1"),
        ("/v1/score", json!({"model": "sim", "text_1": "a", "text_2": ["", "", ""]}), "text_2"),
        ("/rerank", json!({"model": "sim", "documents": ["a"]}), "query"),
        ("/v2/rerank", json!({"model": "sim", "query": "a", "documents": 7}), "documents"),
        ("/classify", json!({"model": "sim"}), "input"),
        ("/pooling", json!({"model": "sim", "input": ["", "", ""]}), "input"),
    ] {
        let reply = trial.post("invalid_request", path, &body).await;
        let error = reply.json();
        assert_eq!((reply.status.as_u16(), &error_of(&error)["param"]), (400, &json!(param)));
        assert_eq!(asked(trial, "w0", path).len(), 0);
    }
    trial.check().await;
}

#[tokio::test]
async fn a_tenant_pays_for_the_tokens_and_may_not_use_other_models() {
    let mut keys = Keys::empty();
    let [acme, other] = ["acme", "other"].map(|name| keys.tenant(name));
    let tenants = "tenants: [ { name: acme, limits: { tokens_per_minute: 1000 } }, \
                   { name: other, models: [default] } ]";
    let cluster = start(&keys, tenants, pooling(1)).await;
    let mut left = 1000;
    for (path, _, body, tokens) in cases() {
        let [acme, other] = [&acme, &other].map(|key| bearer(key));
        let headers = [("authorization", acme.as_str())];
        let reply = cluster.http.post_with(path, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        cluster.settle().await;
        left -= tokens;
        let now = cluster.http.get_with("/v1/models", &headers).await;
        assert_eq!(now.header("x-ratelimit-remaining-tokens"), left.to_string(), "{path}");
        let headers = [("authorization", other.as_str())];
        let refused = cluster.http.post_with(path, &headers, body.to_string()).await;
        assert_eq!(refused.status, 403, "{path}");
    }
}

#[tokio::test]
async fn a_list_of_ranks_is_relayed_as_it_is() {
    const LIST: &str = r#"[{"score": 0.50, "index": 1}, {"score":0.25,"index":0}]"#;
    let solo = Solo::start("{}", |_| ScriptedReply::json(200, LIST)).await;
    let body = json!({"model": "sim", "query": "a", "documents": ["b", "c"]});
    for headers in [&[][..], &[("x-splitrail-usage", "detail")]] {
        let reply = solo.http.post_with("/v1/rerank", headers, body.to_string()).await;
        assert_eq!((reply.status.as_u16(), &*reply.text()), (200, LIST));
    }
}
