//! Roles on the admin listener, and the audit file.

use serde_json::Value;
use splitrail_config::keys::OperatorRole;
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::live::LiveStream;
use splitrail_tests::tenants::{self, Keys, bearer, complete, start};
use splitrail_tests::trial::chat;
use splitrail_tests::{Client, Cluster, Spec};

async fn get(client: &Client, path: &str, key: &str) -> Reply {
    client.get_with(path, &[("authorization", &bearer(key))]).await
}

async fn change(client: &Client, path: &str, key: &str) -> Reply {
    client.post_with(path, &[("authorization", &bearer(key))], "").await
}

#[tokio::test]
async fn a_prompt_of_the_live_page_needs_an_admin_and_is_charged_to_the_named_tenant() {
    let mut keys = Keys::empty();
    let [admin, read] = [OperatorRole::Admin, OperatorRole::Read].map(|role| keys.role(role));
    let tenants = "tenants: [ { name: acme } ]";
    let cluster = start(&keys, tenants, Spec::aggregated(1)).await;
    let send = async |path: &str, key: &str| {
        tenants::post(&cluster.admin, path, key, &chat("a prompt that is typed")).await
    };
    let [unnamed, acme] = ["/admin/playground", "/admin/playground?tenant=acme"];
    assert_eq!(send(acme, &read).await.status, 403);
    let refused = send(unnamed, &admin).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert_eq!(send("/admin/playground?tenant=nobody", &admin).await.status, 404);
    let served = send(acme, &admin).await;
    assert_eq!(served.status, 200, "{}", served.text());
    let id = served.header("x-request-id");
    let path = format!("/admin/decisions?request_id={id}");
    let decisions = get(&cluster.admin, &path, &read).await.json();
    assert_eq!(decisions["decisions"][0]["tenant"], "acme", "{decisions}");
    let used = [("tenant", "acme"), ("kind", "prompt")];
    assert!(cluster.metric("splitrail_tenant_tokens_total", &used).await > 0.0);
}

#[tokio::test]
async fn operators_need_a_role_and_what_they_do_is_written_down() {
    let mut keys = Keys::empty();
    let [admin, read] = [OperatorRole::Admin, OperatorRole::Read].map(|role| keys.role(role));
    let tenant = keys.tenant("acme");
    let audit = keys.folder().join("audit.jsonl");
    let top = format!("audit: {{ path: {:?} }}", audit.display().to_string());
    let tenants = "tenants: [ { name: acme } ]";
    let spec = Spec { top, ..Spec::aggregated(1) };
    let cluster = start(&keys, tenants, spec).await;
    // With `open`, a read role may still not change anything.
    assert_eq!(change(&cluster.admin, "/admin/reload", &read).await.status, 403);
    assert_eq!(cluster.admin.get("/metrics").await.status, 200);

    let drain = "/admin/workers/w0/drain";
    assert_eq!(get(&cluster.admin, "/admin/workers", &read).await.status, 200);
    assert_eq!(get(&cluster.admin, "/admin/workers", &tenant).await.status, 403);
    assert_eq!(get(&cluster.admin, "/admin/workers", "sr-wrong").await.status, 401);
    assert_eq!(change(&cluster.admin, drain, &admin).await.status, 200);
    for _ in 0..100 {
        assert_eq!(complete(&cluster.http, "sr-wrong", &Value::Null).await.status, 401);
    }
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let of = |event: &str| -> Vec<Value> {
        lines().into_iter().filter(|line| line["event"] == event).collect()
    };
    eventually("the change is written down", async || of("change").len() == 2).await;
    let changes = of("change");
    assert_eq!((&changes[0]["status"], &changes[0]["role"]), (&403.into(), &"read".into()));
    let drained = &changes[1];
    assert_eq!((&drained["path"], &drained["status"]), (&drain.into(), &200.into()));
    assert!(drained["key"].as_str().unwrap().starts_with("k-"), "{drained}");
    let refused = of("refused_credential");
    assert!((1..=40).contains(&refused.len()), "{} lines about 100 wrong keys", refused.len());
    assert!(refused.iter().all(|line| line["address"] == "127.0.0.1"));
    let text = std::fs::read_to_string(&audit).unwrap();
    assert!(![&admin, &read, &tenant].iter().any(|key| text.contains(&key[3..20])));
}

#[tokio::test]
async fn with_roles_even_reading_needs_a_credential() {
    let mut keys = Keys::empty();
    let read = keys.role(OperatorRole::Read);
    let spec = Spec { admin_access: ", admin_access: roles", ..Spec::aggregated(1) };
    let cluster = start(&keys, "tenants: [ { name: acme } ]", spec).await;
    assert_eq!(cluster.admin.get("/metrics").await.status, 401);
    assert_eq!(cluster.admin.post_with("/admin/reload", &[], "").await.status, 401);
    for path in ["/health", "/ready"] {
        assert_eq!(cluster.admin.get(path).await.status, 200, "{path}");
    }
    let metrics = get(&cluster.admin, "/metrics", &read).await;
    assert_eq!(metrics.status, 200);
    let labels = [("listener", "admin"), ("reason", "missing")];
    let refused = metric_in(&metrics.text(), "splitrail_refused_credentials_total", &labels);
    assert_eq!(refused, 2.0, "both are counted");
}

#[tokio::test]
async fn a_query_that_cannot_be_read_is_refused_like_everything_else() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    for path in ["/admin/decisions?limit=-1", "/admin/explain?request_id=a&request_id=b"] {
        let reply = match path.starts_with("/admin/explain") {
            true => cluster.admin.post_with(path, &[], "").await,
            false => cluster.admin.get(path).await,
        };
        assert_eq!(reply.status, 400, "{path}");
        assert_eq!(reply.json()["error"]["code"], "invalid_request", "{path}: {}", reply.text());
    }
}

#[tokio::test]
async fn the_live_stream_needs_a_key_and_ends_when_the_key_is_revoked() {
    let mut keys = Keys::empty();
    let (read, tenant) = (keys.role(OperatorRole::Read), keys.tenant("acme"));
    let spec = Spec { admin_access: ", admin_access: roles", ..Spec::aggregated(1) };
    let cluster = start(&keys, "tenants: [ { name: acme } ]", spec).await;
    // The page has no data; it asks for a key.
    for path in ["/", "/page/page.css", "/page/main.js"] {
        assert_eq!(cluster.admin.get(path).await.status, 200, "{path}");
    }
    for path in ["/admin/live", "/admin/live/history"] {
        assert_eq!(cluster.admin.get(path).await.status, 401, "{path}");
        assert_eq!(get(&cluster.admin, path, &tenant).await.status, 403, "{path}");
    }
    let mut live = LiveStream::open(&cluster.admin, &[("authorization", &bearer(&read))]).await;
    let snapshot = live.snapshot().await;
    assert!(!snapshot.to_string().contains(&read[3..20]), "a key in {snapshot}");
    keys.revoke(0);
    let last = loop {
        let event = live.next().await.unwrap();
        if event.name == "end" {
            break event.data;
        }
    };
    assert_eq!(last["reason"], "credential");
    assert!(live.next().await.is_none());
}
