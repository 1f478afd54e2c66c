//! Hand-offs that a hostile prefill engine makes up: none of them has a decode engine open a
//! connection to a host outside the fleet.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;

/// Names of the machine on which the workers are.
const OWN: [&str; 6] =
    ["127.0.0.1", "127.0.0.1.", "127.0.0.9", "localhost", "LOCALHOST", "::ffff:127.0.0.1"];

/// What must be refused, as JSON.
const FOREIGN: [&str; 28] = [
    r#""10.0.0.9""#,
    r#""169.254.169.254""#,
    r#""2130706433""#,
    "2130706433",
    r#""0x7f000001""#,
    r#""127.1""#,
    r#""0177.0.0.1""#,
    r#""[::ffff:10.0.0.9]""#,
    r#""::ffff:10.0.0.9""#,
    r#""64:ff9b::10.0.0.9""#,
    r#""10.0.0.1%eth0""#,
    r#""fe80::1%lo""#,
    r#""\u0131oopback""#,
    r#""\uff11\uff12\uff17.0.0.1""#,
    r#"" 127.0.0.1""#,
    r#""127.0.0.1 ""#,
    r#"["127.0.0.1","10.0.0.9"]"#,
    r#"["127.0.0.1"]"#,
    "null",
    r#"{"a":"10.0.0.9"}"#,
    r#""""#,
    r#""127.0.0.1:80""#,
    r#""http://127.0.0.1""#,
    r#""x@127.0.0.1""#,
    r#""name.invalid""#,
    r#""127.0.0.1.name.invalid""#,
    r#""127.0.0.1\u0000.name.invalid""#,
    "true",
];

/// Whole hand-offs in which another host is hidden, as JSON.
fn whole() -> Vec<String> {
    let with = |members: &str| format!("{{{BASE},{members}}}");
    vec![
        with(r#""remote_host":"127.0.0.1","remote_host":"10.0.0.9""#),
        with(r#""remote_host":"127.0.0.1","remote_\u0068ost":"10.0.0.9""#),
        with(r#""remote_\u0068ost":"10.0.0.9""#),
        r#""10.0.0.9""#.to_owned(),
        r#"[{"remote_host":"10.0.0.9"}]"#.to_owned(),
    ]
}

const BASE: &str = r#""do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",
    "remote_block_ids":[1],"remote_port":5600,"tp_size":1"#;

struct Pair {
    http: Client,
    decode: ScriptedServer,
    _prefill: ScriptedServer,
    _router: RouterProcess,
    /// What the prefill engine answers as its hand-off.
    hand_off: Arc<Mutex<String>>,
}

impl Pair {
    async fn start(folder: &Path) -> Self {
        let hand_off: Arc<Mutex<String>> = Arc::default();
        let next = Arc::clone(&hand_off);
        let prefill = ScriptedServer::start(move |heard| match heard.is_inference() {
            false => ScriptedReply::json(200, "{}"),
            true => {
                let answer = json!({
                    "id": "x", "object": "text_completion", "created": 1, "model": "m",
                    "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
                    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
                });
                let answer = answer.to_string();
                let members = answer.strip_suffix('}').unwrap();
                let hand_off = next.lock().unwrap().clone();
                ScriptedReply::json(200, &format!("{members},\"kv_transfer_params\":{hand_off}}}"))
            }
        })
        .await;
        let decode = ScriptedServer::start(|heard| match heard.is_inference() {
            false => ScriptedReply::json(200, "{}"),
            true => whole_reply(),
        })
        .await;
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: m
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: prefill_first
    connector: nixl
    on_no_prefill: fail
    canary: {{ enabled: false }}
    breaker: {{ failures: 0 }}
    health: {{ ejection: {{ failure_percent: 0 }} }}
    retries: {{ prefill: 0, budget_percent: 1000 }}
    workers:
      - {{ id: p0, role: prefill, url: \"{}\" }}
      - {{ id: d0, role: decode, url: \"{}\" }}
",
            prefill.url(),
            decode.url()
        );
        let log = folder.join("router.log");
        let router = RouterProcess::serve(folder, &yaml, &[], &log).await;
        let http = Client::new(router.http);
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { http, decode, _prefill: prefill, _router: router, hand_off }
    }

    /// Serves a request with this hand-off; the status, and the host that decode was named.
    async fn host_at_decode(&self, hand_off: &str) -> (u16, String, Option<Value>) {
        *self.hand_off.lock().unwrap() = hand_off.to_owned();
        let asked = |post: &ScriptedServer| {
            post.heard().into_iter().filter(|heard| heard.is_inference()).collect::<Vec<_>>()
        };
        let before = asked(&self.decode).len();
        let body = json!({"model": "m", "max_tokens": 4, "prompt": "a prompt of some length"});
        let headers = [("content-type", "application/json")];
        let reply = self.http.post_with("/v1/completions", &headers, body.to_string()).await;
        let seen = asked(&self.decode).into_iter().nth(before);
        let seen = seen.map(|heard| {
            let body: Value = serde_json::from_slice(&heard.body).unwrap();
            body["kv_transfer_params"]["remote_host"].clone()
        });
        (reply.status.as_u16(), reply.text(), seen)
    }
}

#[tokio::test]
async fn no_spelling_of_a_foreign_host_reaches_a_decode_engine() {
    let files = tempfile::tempdir().unwrap();
    let pair = Pair::start(files.path()).await;
    let own = format!("{{{BASE},\"remote_host\":\"127.0.0.1\"}}");
    assert_eq!(pair.host_at_decode(&own).await.2, Some(json!("127.0.0.1")), "the usual one passes");
    for host in FOREIGN {
        let hand_off = format!("{{{BASE},\"remote_host\":{host}}}");
        let (status, text, seen) = pair.host_at_decode(&hand_off).await;
        assert_eq!((status, seen), (503, None), "{host}: {text}");
        assert!(text.contains("no_worker"), "{host}: {text}");
    }
    for hand_off in whole() {
        let (status, text, seen) = pair.host_at_decode(&hand_off).await;
        assert_eq!((status, seen), (503, None), "{hand_off}: {text}");
    }
    for host in OWN {
        let hand_off = format!("{{{BASE},\"remote_host\":\"{host}\"}}");
        let (status, text, seen) = pair.host_at_decode(&hand_off).await;
        let is_as_written = seen == Some(json!(host));
        assert!(is_as_written || (status, &seen) == (503, &None), "{host}: {seen:?} {text}");
    }
    // Other members of a hand-off are the engines' own, and none of them names a host to them.
    let others = r#""remote_host":"127.0.0.1","remote_hosts":["10.0.0.9"],"nested":{"remote_host":"10.0.0.9"}"#;
    let (_, _, seen) = pair.host_at_decode(&format!("{{{BASE},{others}}}")).await;
    assert_eq!(seen, Some(json!("127.0.0.1")));
}
