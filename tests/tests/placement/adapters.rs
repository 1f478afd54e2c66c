//! Adapters that come, go and change while engines run: requests follow them, and nothing of an earlier
//! load is promised or handed over.

use serde_json::{Value, json};
use splitrail_sim::RecordedRequest;
use splitrail_tests::client::{Reply, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn spec(spec: Spec) -> Spec {
    Spec { model: "adapters: [lora]\nhealth: { probe_interval: 100ms }".into(), ..spec }
}

/// A request for the adapter.
fn adapted(words: usize, seed: &str) -> Value {
    let mut body = completion(&prompt(words, seed));
    body["model"] = "lora".into();
    body
}

async fn tell(cluster: &Cluster, engine: &str, path: &str, body: Value) {
    let engine = Client::new(cluster.engine(engine).http_addr());
    let reply = engine.post(path, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

async fn load(cluster: &Cluster, engine: &str, path: &str) {
    let body = json!({"lora_name": "lora", "lora_path": path, "load_inplace": false});
    tell(cluster, engine, "/v1/load_lora_adapter", body).await;
}

async fn unload(cluster: &Cluster, engine: &str) {
    tell(cluster, engine, "/v1/unload_lora_adapter", json!({"lora_name": "lora"})).await;
}

/// Waits until the router knows which workers have the adapter.
async fn known(cluster: &Cluster, expected: &[&str]) {
    eventually("the router knows who has the adapter", async || {
        let workers = cluster.admin.get("/admin/workers").await.json();
        let workers = workers["workers"].as_array().unwrap().iter();
        let has = workers.filter(|worker| worker["adapters"] == json!(["lora"]));
        let mut ids: Vec<_> = has.map(|worker| worker["id"].as_str().unwrap().to_owned()).collect();
        ids.sort();
        ids == expected
    })
    .await;
}

/// The requests for the adapter that an engine was sent by clients.
fn served_by(cluster: &Cluster, engine: &str) -> usize {
    let is_one = |request: &RecordedRequest| {
        request.path == COMPLETIONS
            && request.body["model"] == "lora"
            && request.body["user"] == "c"
    };
    cluster.engine(engine).requests().iter().filter(|request| is_one(request)).count()
}

async fn ask(cluster: &Cluster, seed: &str) -> Reply {
    let mut body = adapted(40, seed);
    body["user"] = "c".into();
    cluster.http.post(COMPLETIONS, &body).await
}

async fn explained(cluster: &Cluster, body: &Value) -> Value {
    let reply = cluster.admin.post_with("/admin/explain", &JSON, body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["explanation"]["prompts"][0].clone()
}

fn cached(reply: &Reply) -> u64 {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn lists_the_adapter(cluster: &Cluster) -> bool {
    let models = cluster.http.get("/v1/models").await.json();
    models["data"].as_array().unwrap().iter().any(|model| model["id"] == "lora")
}

#[tokio::test]
async fn requests_follow_an_adapter_and_none_is_refused_while_it_moves() {
    let cluster = Cluster::start(spec(Spec::aggregated(2))).await;
    load(&cluster, "w0", "/adapters/1").await;
    known(&cluster, &["w0"]).await;
    for seed in ["a", "b", "c", "d"] {
        assert_eq!(ask(&cluster, seed).await.status, 200);
    }
    assert_eq!((served_by(&cluster, "w0"), served_by(&cluster, "w1")), (4, 0));
    let step = explained(&cluster, &adapted(40, "a")).await["steps"][0].clone();
    assert_eq!(step["chosen"], "w0");
    assert_eq!(step["vetoed"], json!([{"worker": "w1", "reasons": ["lacks_adapter"]}]));
    let attention = cluster.admin.get("/admin/attention").await.text();
    assert!(attention.contains("adapters_differ"), "{attention}");

    load(&cluster, "w1", "/adapters/1").await;
    unload(&cluster, "w0").await;
    // The router may not have asked the engines again.
    for seed in ["e", "f", "g", "h"] {
        let reply = ask(&cluster, seed).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(served_by(&cluster, "w1"), 4);
    known(&cluster, &["w1"]).await;
    let before = served_by(&cluster, "w0");
    assert_eq!(ask(&cluster, "i").await.status, 200);
    assert_eq!((served_by(&cluster, "w0"), served_by(&cluster, "w1")), (before, 5));
}

#[tokio::test]
async fn an_adapter_that_no_worker_has_is_not_found_and_one_whose_worker_rests_comes_back() {
    let cluster = Cluster::start(spec(Spec::aggregated(2))).await;
    load(&cluster, "w0", "/adapters/1").await;
    known(&cluster, &["w0"]).await;
    assert!(lists_the_adapter(&cluster).await);
    assert_eq!(cluster.http.get("/v1/models/lora").await.status, 200);

    cluster.admin.post_with("/admin/workers/w0/drain", &[], "").await;
    let reply = ask(&cluster, "a").await;
    assert_eq!(
        (reply.status.as_u16(), reply.json()["error"]["code"].as_str()),
        (503, Some("no_worker"))
    );
    assert!(!reply.header("retry-after").is_empty());
    cluster.admin.delete("/admin/workers/w0/drain").await;
    assert_eq!(ask(&cluster, "a").await.status, 200);

    unload(&cluster, "w0").await;
    known(&cluster, &[]).await;
    let reply = ask(&cluster, "b").await;
    let code = reply.json()["error"]["code"].clone();
    assert_eq!(
        (reply.status.as_u16(), code.as_str()),
        (404, Some("engine_lacks_model")),
        "{}",
        reply.text()
    );
    assert!(!lists_the_adapter(&cluster).await);
    assert_eq!(cluster.http.get("/v1/models/lora").await.status, 404);
    // The model itself is served by all workers.
    assert_eq!(cached(&cluster.http.post(COMPLETIONS, &completion(&prompt(40, "a"))).await), 0);
}

#[tokio::test]
async fn what_is_promised_and_told_after_a_reload_under_the_same_name_is_what_the_engine_uses() {
    let cluster = Cluster::start(spec(Spec::aggregated(1))).await;
    load(&cluster, "w0", "/adapters/1").await;
    known(&cluster, &["w0"]).await;
    let body = adapted(40, "a");
    let promised = async || {
        let told = explained(&cluster, &body).await;
        told["steps"][0]["candidates"][0]["overlap_blocks"].as_u64().unwrap()
    };
    let mut texts = Vec::new();
    for path in ["/adapters/1", "/adapters/2", "/adapters/3"] {
        match path {
            "/adapters/2" => {
                unload(&cluster, "w0").await;
                load(&cluster, "w0", path).await;
            }
            "/adapters/3" => {
                let body = json!({"lora_name": "lora", "lora_path": path, "load_inplace": true});
                tell(&cluster, "w0", "/v1/load_lora_adapter", body).await;
            }
            _ => {}
        }
        eventually("nothing of the earlier load is promised", async || promised().await == 0).await;
        let cold = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(cached(&cold), 0, "{path}");
        let all = explained(&cluster, &body).await["prompt_blocks"].as_u64().unwrap();
        eventually("all of it is promised", async || promised().await == all).await;
        let warm = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(cached(&warm), all * 16, "{path}");
        texts.push(whole_text(&cold.json(), 0));
        assert_eq!(texts.last(), Some(&whole_text(&warm.json(), 0)));
    }
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 3, "each load has its own weights");
    // Loaded again from the same path, the engine finds its blocks, and the router says so.
    unload(&cluster, "w0").await;
    known(&cluster, &[]).await;
    load(&cluster, "w0", "/adapters/3").await;
    known(&cluster, &["w0"]).await;
    let blocks = promised().await;
    assert_eq!(cached(&cluster.http.post(COMPLETIONS, &body).await), blocks * 16);
    assert!(blocks > 0);
}

#[tokio::test]
async fn no_pair_is_formed_of_workers_with_different_loads() {
    let cluster = Cluster::start(spec(Spec { prefill: 1, decode: 1, ..Spec::default() })).await;
    for engine in ["p0", "d0"] {
        load(&cluster, engine, "/adapters/1").await;
    }
    known(&cluster, &["d0", "p0"]).await;
    let pair = ask(&cluster, "a").await;
    assert_eq!((pair.route("prefill"), pair.route("decode")), (Some("p0"), Some("d0")));

    unload(&cluster, "d0").await;
    load(&cluster, "d0", "/adapters/2").await;
    let body = adapted(40, "b");
    eventually("the router knows the paths", async || {
        explained(&cluster, &body).await["local_reason"] == "no_prefill"
    })
    .await;
    let before = served_by(&cluster, "p0");
    let alone = ask(&cluster, "b").await;
    assert_eq!(
        (alone.status.as_u16(), alone.route("decode")),
        (200, Some("d0")),
        "{}",
        alone.text()
    );
    assert_eq!(served_by(&cluster, "p0"), before);
    let attention = cluster.admin.get("/admin/attention").await.text();
    assert!(attention.contains("from another path"), "{attention}");

    unload(&cluster, "p0").await;
    load(&cluster, "p0", "/adapters/2").await;
    eventually("both have the same load", async || {
        explained(&cluster, &body).await["local_reason"].is_null()
    })
    .await;
    let pair = ask(&cluster, "c").await;
    assert_eq!((pair.route("prefill"), pair.route("decode")), (Some("p0"), Some("d0")));
}
