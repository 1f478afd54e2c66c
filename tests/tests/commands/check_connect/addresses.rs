//! What `check --connect` says of addresses at which no engine listens, or one that refuses the router.

use std::net::SocketAddr;

use splitrail_sim::SimConfig;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::tls_server::{ServerCertificate, TlsServer, fixture};
use splitrail_tests::unanswering::Unanswering;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::support::{Pair, checked, config, decode, prefill, printed, worker};

/// The pair with another worker in place of the prefill worker.
fn with_prefill(pair: &Pair, prefill: &str, keys: &str) -> String {
    config(keys, &[prefill.to_owned(), worker("d0", "decode", &pair.decode)])
}

const KEYS: &str = "block_size: 16";

#[tokio::test]
async fn a_port_at_which_nothing_listens_is_named() {
    let pair = Pair::sound().await;
    let port = HeldPort::take();
    let result = checked(&with_prefill(&pair, &port.worker("p0", "prefill"), KEYS)).await;
    assert_eq!(result.code, Some(69));
    assert!(result.only("p0", "refused").contains(&format!(":{}", port.number())));
    assert_eq!(result.facts("p0")["reached"], false);
    assert_eq!(result.facts("d0")["reached"], true, "the others are asked nevertheless");
}

#[tokio::test]
async fn an_address_that_answers_nothing_is_late() {
    let pair = Pair::sound().await;
    let silent = Unanswering::start().await;
    let worker = silent.worker("p0", "prefill");
    // Also where routers wait for connections for longer than the check does.
    for keys in [KEYS.to_owned(), format!("{KEYS}\ntimeouts: {{ connect: 30s }}")] {
        let result = checked(&with_prefill(&pair, &worker, &keys)).await;
        let words = result.only("p0", "late");
        assert!(words.starts_with("no connection to http://127.0.0.1:"), "{words}");
        assert!(words.contains("open the port in firewalls and network policies"), "{words}");
        assert_eq!(result.code, Some(69));
    }
}

/// A proxy that refuses whatever it is sent.
async fn forbidding(tasks: &mut JoinSet<()>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move {
        let reply = "HTTP/1.1 403 Forbidden\r\nserver: istio-envoy\r\ncontent-length: 19\r\n\r\nRBAC: access denied";
        while let Ok((mut socket, _)) = listener.accept().await {
            let _read = socket.read(&mut [0; 4096]).await;
            // The check may hang up, which is the end of this.
            let _sent = socket.write_all(reply.as_bytes()).await;
        }
    });
    address
}

#[tokio::test]
async fn a_proxy_that_refuses_is_not_taken_for_an_engine_that_asks_for_a_key() {
    let pair = Pair::sound().await;
    let mut tasks = JoinSet::new();
    let url = format!("http://{}", forbidding(&mut tasks).await);
    let prefill = format!("{{ id: p0, role: prefill, url: \"{url}\" }}");
    let result = checked(&with_prefill(&pair, &prefill, KEYS)).await;
    let words = result.only("p0", "forbidden");
    assert!(words.contains("403") && words.contains("proxy"), "{words}");
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn the_port_of_kv_events_is_no_http_server() {
    let pair = Pair::sound().await;
    let events = pair.prefill.kv_events_endpoint().unwrap().replace("tcp:", "http:");
    let prefill = format!("{{ id: p0, role: prefill, url: \"{events}\" }}");
    let result = checked(&with_prefill(&pair, &prefill, KEYS)).await;
    assert!(result.only("p0", "not_http").contains("KV events"));
}

#[tokio::test]
async fn a_server_that_is_no_engine_is_recognised() {
    let pair = Pair::sound().await;
    // The side channel serves other paths only.
    let url = pair.decode.bootstrap_url();
    let prefill = format!("{{ id: p0, role: prefill, url: \"{url}\" }}");
    let result = checked(&with_prefill(&pair, &prefill, KEYS)).await;
    assert!(result.only("p0", "not_an_engine").contains("404"));
}

#[tokio::test]
async fn tls_must_be_on_both_sides() {
    let pair = Pair::sound().await;
    let prefill = worker("p0", "prefill", &pair.prefill).replace("http://", "https://");
    let result = checked(&with_prefill(&pair, &prefill, KEYS)).await;
    assert!(result.only("p0", "tls_failed").contains("http://"));
    let printed = printed(&with_prefill(&pair, &prefill, KEYS), &["--connect"]).await;
    assert!(!printed.text.contains("DEBUG"), "nothing is logged that nobody asked for");

    let server = TlsServer::start(pair.prefill.http_addr(), ServerCertificate::VALID).await;
    let plain = server.url().replace("https://", "http://");
    let prefill = format!("{{ id: p0, role: prefill, url: \"{plain}\" }}");
    let result = checked(&with_prefill(&pair, &prefill, KEYS)).await;
    assert!(result.only("p0", "not_http").contains("https://"));
}

#[tokio::test]
async fn a_certificate_that_is_not_trusted_is_explained() {
    let pair = Pair::sound().await;
    let server = TlsServer::start(pair.prefill.http_addr(), ServerCertificate::VALID).await;
    let behind_tls =
        worker("p0", "prefill", &pair.prefill).replace(&pair.prefill.url(), &server.url());
    let ca = |name: &str| format!("{KEYS}\nengine_tls: {{ ca: {:?} }}", fixture(name));
    let result = checked(&with_prefill(&pair, &behind_tls, &ca("ca.pem"))).await;
    assert!(result.only("p0", "tls_failed").contains("not from an authority in engine_tls.ca"));
    let result = checked(&with_prefill(&pair, &behind_tls, &ca("engines/ca.pem"))).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
}

#[tokio::test]
async fn an_engine_that_requires_a_key_is_recognised_and_the_key_is_never_shown() {
    const KEY: &str = "sk-a-key-of-the-engines";
    let key = Some(KEY.to_owned());
    let keyed = |config: SimConfig| SimConfig { api_key: key.clone(), ..config };
    let pair = Pair::of(keyed(prefill()), keyed(decode())).await;
    let result = checked(&pair.yaml()).await;
    assert_eq!(result.kinds(), [(Some("p0"), "key_refused"), (Some("d0"), "key_refused")]);
    assert!(result.words("key_refused").contains("engine_api_key"));

    let files = tempfile::tempdir().unwrap();
    for (given, code) in [(KEY, 0), ("sk-another-key", 69)] {
        let path = files.path().join("key");
        std::fs::write(&path, given).unwrap();
        let keys = format!("{KEYS}\nengine_api_key: {{ kind: file, path: {path:?} }}");
        let printed = printed(&pair.yaml_with(&keys), &["--connect"]).await;
        assert_eq!(printed.code, Some(code), "{}", printed.text);
        assert!(!printed.text.contains(given), "{}", printed.text);
    }
}

#[tokio::test]
async fn workers_that_dns_finds_are_asked_within_the_allowed_networks() {
    let pair = Pair::sound().await;
    let port = pair.decode.http_addr().port();
    let yaml = |networks: &str| {
        format!(
            "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
fleet: {{ networks: [{networks}] }}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    discovery:
      - {{ kind: dns, name: localhost, port: {port}, role: both, family: ipv4 }}
"
        )
    };
    let inside = checked(&yaml("127.0.0.0/8")).await;
    let worker = &inside.json["models"][0]["workers"][0];
    assert_eq!(worker["source"], format!("dns:localhost:{port}"), "{:#}", inside.json);
    assert_eq!(worker["facts"]["reached"], true);
    let outside = checked(&yaml("10.0.0.0/8")).await;
    assert!(outside.words("outside_networks").contains("fleet.networks"));
    assert_eq!(outside.code, Some(69));
}
