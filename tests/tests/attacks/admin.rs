//! The admin listener: who may read and change, and how long a connection may take.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::{Value, json};
use splitrail_config::keys::OperatorRole;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw;
use splitrail_tests::tenants::{Keys, bearer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::support::{Site, engine, yaml};

async fn site(top: &str) -> Site {
    Site::start(top, "", tempfile::tempdir().unwrap()).await
}

/// Waits until the router has closed a connection; what it said before.
async fn closed(connection: &mut TcpStream) -> String {
    let mut said = Vec::new();
    let reading = connection.read_to_end(&mut said);
    // A reset is an end as well.
    let _ended = tokio::time::timeout(Duration::from_secs(30), reading).await.unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test]
async fn heads_that_never_end_neither_stay_nor_keep_metrics_from_being_read() {
    let site = site("limits: { header_timeout: 3s }").await;
    let mut dripping = Vec::new();
    for _ in 0..200 {
        let mut connection = TcpStream::connect(site.admin_at).await.unwrap();
        connection.write_all(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ").await.unwrap();
        dripping.push(connection);
    }
    let cut = [("listener", "admin"), ("reason", "header_timeout")];
    assert!(site.metric("splitrail_connections", &[("listener", "admin")]).await >= 1.0);
    for connection in &mut dripping {
        // A byte now and then does not help.
        let _gone = connection.write_all(b"a").await;
    }
    for connection in &mut dripping {
        closed(connection).await;
    }
    assert!(site.metric("splitrail_connections_cut_total", &cut).await >= 200.0);
}

#[tokio::test]
async fn connections_that_carry_nothing_are_closed_and_no_more_than_the_bound_are_open() {
    let site = site("limits: { idle_timeout: 1s, header_timeout: 3s, connections_max: 20 }").await;
    let mut kept = TcpStream::connect(site.admin_at).await.unwrap();
    kept.write_all(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await.unwrap();
    let said = closed(&mut kept).await;
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    let mut open = Vec::new();
    for _ in 0..40 {
        open.push(TcpStream::connect(site.admin_at).await.unwrap());
    }
    let mut refused = 0;
    for connection in &mut open {
        refused += usize::from(closed(connection).await.starts_with("HTTP/1.1 503"));
    }
    assert!(refused >= 20, "{refused}");
    eventually("it answers again", async || {
        site.admin.try_get("/metrics").await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
}

#[tokio::test]
async fn a_body_that_does_not_come_ends_its_request() {
    let site = site("limits: { body_timeout: 1s, body_grace: 100ms }").await;
    let mut connection = TcpStream::connect(site.admin_at).await.unwrap();
    let head = "POST /admin/workers HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
                content-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    connection.write_all(head.as_bytes()).await.unwrap();
    let said = closed(&mut connection).await;
    assert!(said.starts_with("HTTP/1.1 408"), "{said}");
}

#[tokio::test]
async fn web_pages_and_other_names_neither_read_nor_change_anything() {
    let site = site("").await;
    let get =
        |host: &str| format!("GET /admin/workers HTTP/1.1\r\n{host}connection: close\r\n\r\n");
    let post = |headers: &str| {
        format!(
            "POST /admin/workers/w0/drain HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\
             content-length: 0\r\nconnection: close\r\n\r\n"
        )
    };
    for (request, status) in [
        (get("host: 127.0.0.1:9090\r\n"), 200),
        (get("host: [::1]\r\n"), 200),
        (get("host: [::ffff:127.0.0.1]\r\n"), 200),
        (get("host: evil.example:19090\r\n"), 403),
        (get("host: localhost.evil.example\r\n"), 403),
        (get("host: localhost.\r\n"), 403),
        (get("host: 127.0.0.1@evil.example\r\n"), 400),
        ("GET /health HTTP/1.0\r\n\r\n".to_owned(), 200),
        ("GET http://evil.example/metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".to_owned(), 403),
        (post("origin: http://evil.example\r\n"), 403),
        (post("origin: null\r\n"), 403),
        (post("sec-fetch-site: cross-site\r\n"), 403),
        (post("sec-fetch-site: same-origin\r\n"), 403),
    ] {
        let reply = raw::exchange(site.admin_at, request.as_bytes()).await.expect(&request);
        assert_eq!(reply.status(), status, "{request}{}", reply.text());
        let code = if request.starts_with("GET") { "forbidden_host" } else { "forbidden" };
        assert!(status != 403 || reply.text().contains(&format!("\"code\":\"{code}\"")), "{request}");
    }
    assert_eq!(site.worker("w0").await["draining"], false);
    let drained = raw::exchange(site.admin_at, post("").as_bytes()).await.expect("a reply");
    assert_eq!(drained.status(), 200);
    assert_eq!(site.worker("w0").await["draining"], true);
}

/// As in containers, whose ports are published to the loopback of their host.
#[tokio::test]
async fn a_listener_on_all_addresses_shows_nothing_under_the_name_of_a_web_page() {
    let engine = engine().await;
    let yaml = yaml(&engine.url(), "", "").replace("admin: 127.0.0.1:0", "admin: 0.0.0.0:0");
    let site = Site::serve(engine, &yaml, tempfile::tempdir().unwrap()).await;
    let site_at = (Ipv4Addr::LOCALHOST, site.admin_at.port()).into();
    for (path, host, status) in [
        ("/admin/config", "evil.example:9090", 403),
        ("/admin/live", "127.0.0.1.evil.example", 403),
        ("/admin/workers", "router:9090", 403),
        ("/admin/config", "127.0.0.1:9090", 200),
        ("/admin/config", "localhost:9090", 200),
        ("/admin/config", "192.0.2.1:9090", 200),
        ("/metrics", "router:9090", 200),
        ("/health", "router:9090", 200),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let reply = raw::exchange(site_at, request.as_bytes()).await.expect(&request);
        assert_eq!(reply.status(), status, "{request}{}", reply.text());
    }
}

#[tokio::test]
async fn changes_of_web_pages_do_not_fill_the_audit_file() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit.jsonl");
    let site = Site::start(&format!("audit: {{ path: {audit:?} }}"), "", folder).await;
    let path = format!("/admin/workers/{}", "w".repeat(2000));
    let of_a_page = [("origin", "http://evil.example")];
    for _ in 0..1000 {
        assert_eq!(site.admin.post_with(&path, &of_a_page, "").await.status, 403);
    }
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        // The last line may not be written whole yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // The first line of a later second says how many there were.
    eventually("a line names what was left out", async || {
        site.admin.post_with("/admin/reload", &of_a_page, "").await;
        lines().iter().any(|line| line["left_out"].is_u64())
    })
    .await;
    let all = lines();
    let seconds = all.last().unwrap()["unix_ms"].as_u64().unwrap() / 1000
        - all[0]["unix_ms"].as_u64().unwrap() / 1000;
    assert!(all.len() as u64 <= 10 * (seconds + 1), "{} lines in {seconds} s", all.len());
    assert!(all.iter().all(|line| line["path"].as_str().unwrap().len() <= 256));
    assert_eq!((&all[0]["event"], &all[0]["status"]), (&"change".into(), &403.into()));
    // What an operator does is always written down.
    assert_eq!(site.admin.post_with("/admin/workers/w0/drain", &[], "").await.status, 200);
    eventually("the change is written down", async || {
        lines().iter().any(|line| line["path"] == "/admin/workers/w0/drain")
    })
    .await;
}

#[tokio::test]
async fn web_pages_of_other_sites_start_no_costly_read() {
    let site = site("").await;
    for (path, fetch_site, status) in [
        ("/metrics", "cross-site", 403),
        ("/admin/workers/w0/index", "cross-site", 403),
        ("/admin/decisions", "same-site", 403),
        ("/admin/workers/w0/index", "same-origin", 200),
        ("/metrics", "none", 200),
        ("/health", "cross-site", 200),
        ("/", "cross-site", 200),
    ] {
        let reply = site.admin.get_with(path, &[("sec-fetch-site", fetch_site)]).await;
        assert_eq!(reply.status, status, "{path} {fetch_site} {}", reply.text());
    }
}

#[tokio::test]
async fn a_worker_is_added_only_where_workers_and_their_events_may_be() {
    let site = site("fleet: { networks: [127.0.0.1/32] }").await;
    let beside = engine().await;
    let add = async |id: &str, url: &str, more: Value| {
        let mut worker = json!({"id": id, "role": "both", "url": url});
        worker.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let json = [("content-type", "application/json")];
        let body = json!({"worker": worker}).to_string();
        site.admin.post_with("/admin/workers", &json, body).await
    };
    let metadata = "tcp://169.254.169.254:80";
    let near = "tcp://127.0.0.1:9";
    for (url, more) in [
        ("http://127.0.0.9:8000", json!({})),
        (&*beside.url(), json!({"kv_events": metadata})),
        (&*beside.url(), json!({"kv_events": "tcp://127.0.0.9:5557"})),
        (&*beside.url(), json!({"kv_events": near, "kv_replay": metadata})),
        // Nor beside a worker that is written down.
        (&*site.engine.url(), json!({"kv_events": metadata})),
    ] {
        let refused = add("x", url, more.clone()).await;
        assert_eq!(refused.status, 409, "{url} {more} {}", refused.text());
        assert!(refused.text().contains("outside fleet.networks"), "{}", refused.text());
    }
    assert_eq!(site.worker("x").await, Value::Null);
    let added = add("x", &beside.url(), json!({"kv_events": near})).await;
    assert_eq!(added.status, 201, "{}", added.text());
}

#[tokio::test]
async fn wrong_keys_of_clients_keep_no_refused_change_out_of_the_audit_file() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit.jsonl");
    let keys = Keys::empty();
    let top = format!("audit: {{ path: {audit:?} }}\n{}", keys.auth());
    let site = Site::start(&top, "", folder).await;
    let body = json!({"model": "sim", "prompt": "a", "max_tokens": 1});
    let wrong = [("authorization", "Bearer wrong"), ("content-type", "application/json")];
    let flood = async || {
        let refused = site.http.post_with("/v1/completions", &wrong, body.to_string()).await;
        assert_eq!(refused.status, 401);
    };
    for _ in 0..30 {
        flood().await;
    }
    let of_a_page = [("origin", "http://evil.example")];
    assert_eq!(site.admin.post_with("/admin/reload", &of_a_page, "").await.status, 403);
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // A line of a later second says how many were left out before.
    eventually("the flood has been left out", async || {
        flood().await;
        lines().iter().any(|line| line["left_out"].is_u64())
    })
    .await;
    let all = lines();
    let change = all.iter().find(|line| line["path"] == "/admin/reload").expect("it is recorded");
    assert_eq!((&change["listener"], &change["left_out"]), (&"admin".into(), &Value::Null));
    let left_out = all.iter().filter(|line| line["left_out"].is_u64());
    assert!(left_out.map(|line| &line["listener"]).all(|listener| listener == "http"));
}

#[tokio::test]
async fn a_key_that_may_only_read_pushes_no_line_out_of_the_audit_file() {
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit.jsonl");
    let mut keys = Keys::empty();
    let [admin, noisy, other] =
        [OperatorRole::Admin, OperatorRole::Read, OperatorRole::Read].map(|role| keys.role(role));
    let top = format!("audit: {{ path: {audit:?} }}\n{}", keys.auth());
    let site = Site::start(&top, "", folder).await;
    let change = async |path: &str, key: &str| {
        site.admin.post_with(path, &[("authorization", &*bearer(key))], "").await.status
    };
    assert_eq!(change("/admin/workers/w0/drain", &admin).await, 200);
    let long = format!("/admin/workers/{}", "w".repeat(200));
    for _ in 0..1000 {
        assert_eq!(change(&long, &noisy).await, 403);
    }
    assert_eq!(change("/admin/reload", &other).await, 403);
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&audit).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    // Lines reach the file some time after their replies.
    eventually("the other key has its line, and one names what was left out", async || {
        change(&long, &noisy).await;
        let lines = lines();
        let has = |is_it: fn(&Value) -> bool| lines.iter().any(is_it);
        has(|line| line["path"] == "/admin/reload") && has(|line| line["left_out"].is_u64())
    })
    .await;
    let all = lines();
    let of = |path: &str| all.iter().filter(|line| line["path"] == path).collect::<Vec<_>>();
    let seconds = all.last().unwrap()["unix_ms"].as_u64().unwrap() / 1000
        - all[0]["unix_ms"].as_u64().unwrap() / 1000;
    let refused = of(&long).len() as u64;
    assert!(refused <= 10 * (seconds + 1), "{refused} lines in {seconds} s");
    assert_eq!(of("/admin/workers/w0/drain").len(), 1);
    let [refused] = of("/admin/reload")[..] else { panic!("{all:?}") };
    assert_eq!((&refused["role"], &refused["left_out"]), (&"read".into(), &Value::Null));
}
