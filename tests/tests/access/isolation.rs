//! Tenants do not see each other's cached blocks, nor how requests are routed.

use serde_json::json;
use splitrail_proto::v1::generate_response::Event;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::tenants::{Keys, bearer, cached, complete, start};
use splitrail_tests::trial::{completion, prompt};

const TENANTS: &str = "tenants:
- { name: acme }
- { name: beta }
- { name: red, cache: shared }
- { name: blue, cache: shared }
- { name: inner, cache: { shared: inner } }
- { name: debugger, debug: true }
";

#[tokio::test]
async fn one_prompt_of_two_tenants_shares_nothing_and_within_a_group_everything() {
    let mut keys = Keys::empty();
    let [acme, beta, red, blue, inner] =
        ["acme", "beta", "red", "blue", "inner"].map(|name| keys.tenant(name));
    let cluster = start(&keys, TENANTS, Spec::default()).await;
    let body = completion(&prompt(100, "same "));
    let whole = async |key: &str, body| {
        let reply = complete(&cluster.http, key, body).await;
        cluster.settle().await;
        cached(&reply)
    };
    assert_eq!(whole(&acme, &body).await, 0);
    let warm = whole(&acme, &body).await;
    assert!(warm > 0, "a tenant hits its own blocks");
    assert_eq!(whole(&beta, &body).await, 0, "and not those of another tenant");
    assert_eq!(whole(&red, &body).await, 0, "nor does a group");
    assert_eq!(whole(&blue, &body).await, warm, "within a group all blocks are shared");
    assert_eq!(whole(&inner, &body).await, 0, "groups of other names share nothing");

    // A client's own salt narrows what it shares.
    let salted = |salt: &str| {
        let mut body = body.clone();
        body["cache_salt"] = json!(salt);
        body
    };
    let mine = salted("mine");
    assert_eq!(whole(&acme, &mine).await, 0);
    assert_eq!(whole(&acme, &mine).await, warm);
    assert_eq!(whole(&acme, &body).await, warm);
}

#[tokio::test]
async fn the_salt_of_another_tenant_is_of_no_use() {
    let mut keys = Keys::empty();
    let [acme, beta] = ["acme", "beta"].map(|name| keys.tenant(name));
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let body = completion(&prompt(100, "same "));
    assert_eq!(cached(&complete(&cluster.http, &acme, &body).await), 0);
    cluster.settle().await;
    // The salt that the engine got for the first tenant, as its events show it.
    let access = cluster.running.core.access.load();
    let salt = access.tenant("acme").unwrap().salt(None);
    let mut imitated = body.clone();
    imitated["cache_salt"] = json!(salt);
    assert_eq!(cached(&complete(&cluster.http, &beta, &imitated).await), 0);
    let name = [("authorization", bearer(&beta)), ("x-tenant", "acme".to_owned())];
    let headers: Vec<_> = name.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let reply = cluster.http.post_with("/v1/completions", &headers, body.to_string()).await;
    assert_eq!(cached(&reply), 0, "a name in a header means nothing");
}

#[tokio::test]
async fn only_a_tenant_with_debug_sees_how_its_requests_are_routed() {
    let mut keys = Keys::empty();
    let [acme, debugger] = ["acme", "debugger"].map(|name| keys.tenant(name));
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let body = completion(&prompt(20, "a"));
    for (key, sees) in [(&acme, false), (&debugger, true)] {
        let authorization = bearer(key);
        let headers = [("authorization", authorization.as_str()), ("x-splitrail-usage", "detail")];
        let reply = cluster.http.post_with("/v1/completions", &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        for header in ["x-splitrail-route", "server-timing"] {
            assert_eq!(!reply.header(header).is_empty(), sees, "{header}");
        }
        assert_eq!(reply.json()["usage"].get("splitrail").is_some(), sees);
    }
}

#[tokio::test]
async fn an_explanation_is_for_one_tenant() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let body = completion(&prompt(100, "same "));
    assert_eq!(cached(&complete(&cluster.http, &acme, &body).await), 0);
    cluster.settle().await;
    let overlap = async |tenant: &str| {
        let path = format!("/admin/explain?tenant={tenant}");
        let json = [("content-type", "application/json")];
        let told = cluster.admin.post_with(&path, &json, body.to_string()).await;
        assert_eq!(told.status, 200, "{}", told.text());
        let step = told.json()["explanation"]["prompts"][0]["steps"][0].clone();
        step["candidates"][0]["overlap_blocks"].as_u64().unwrap()
    };
    assert!(overlap("acme").await > 0);
    assert_eq!(overlap("beta").await, 0);
    let json = [("content-type", "application/json")];
    let unknown = cluster.admin.post_with("/admin/explain?tenant=no", &json, "{}").await;
    assert_eq!(unknown.status, 404);
}

#[tokio::test]
async fn only_a_tenant_with_debug_sees_the_route_of_a_call_over_grpc() {
    let mut keys = Keys::empty();
    let [acme, debugger] = ["acme", "debugger"].map(|name| keys.tenant(name));
    let cluster = start(&keys, TENANTS, Spec::aggregated(1)).await;
    let mut client = grpc_client(cluster.running.addresses.grpc.unwrap());
    for (key, sees) in [(&acme, false), (&debugger, true)] {
        let mut call = tonic::Request::new(text_request("a b c", ""));
        call.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
        let mut events = client.generate(call).await.unwrap().into_inner();
        let first = events.message().await.unwrap().unwrap().event;
        let Some(Event::Started(started)) = first else { panic!("no start: {first:?}") };
        assert_eq!(started.route.is_some(), sees);
        while events.message().await.unwrap().is_some() {}
    }
}

#[tokio::test]
async fn only_a_tenant_with_debug_is_told_which_worker_failed() {
    let mut keys = Keys::empty();
    let [acme, debugger] = ["acme", "debugger"].map(|name| keys.tenant(name));
    let model = "breaker: { failures: 0 }".into();
    let cluster = start(&keys, TENANTS, Spec { model, ..Spec::aggregated(1) }).await;
    for kind in [FaultKind::Status { status: 500 }, FaultKind::Reset] {
        cluster.engine("w0").set_fault(Fault { kind, times: None });
        for (key, is_told) in [(&acme, false), (&debugger, true)] {
            let reply = complete(&cluster.http, key, &completion(&prompt(20, "a"))).await;
            assert!(reply.status.is_server_error(), "{}", reply.text());
            assert_eq!(reply.text().contains("w0"), is_told, "{}", reply.text());
        }
    }
}

#[tokio::test]
async fn records_carry_the_tenant() {
    let mut keys = Keys::empty();
    let acme = keys.tenant("acme");
    let ledger = keys.folder().join("ledger.jsonl");
    let top = format!("ledger: {{ path: {:?} }}", ledger.display().to_string());
    let cluster = start(&keys, TENANTS, Spec { top, ..Spec::aggregated(1) }).await;
    let reply = complete(&cluster.http, &acme, &completion(&prompt(20, "a"))).await;
    let decisions = cluster.decisions(reply.header("x-request-id")).await;
    assert_eq!(decisions[0]["tenant"], "acme");
    eventually("the ledger has the request", async || {
        let text = std::fs::read_to_string(&ledger).unwrap_or_default();
        text.contains("\"tenant\":\"acme\"")
    })
    .await;
    let usage = &reply.json()["usage"];
    for (kind, tokens) in [("prompt", "prompt_tokens"), ("completion", "completion_tokens")] {
        let labels = [("tenant", "acme"), ("kind", kind)];
        let counted = cluster.metric("splitrail_tenant_tokens_total", &labels).await;
        assert_eq!(counted, usage[tokens].as_f64().unwrap(), "{kind}");
    }
    let text =
        std::fs::read_to_string(&ledger).unwrap() + &cluster.admin.get("/metrics").await.text();
    assert!(!text.contains(&acme[3..20]), "no key is written down");
}
