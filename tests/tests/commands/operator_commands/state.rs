//! `status`, `workers` and `explain` over several routers.

use serde_json::{Value, json};
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tenants::Keys;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tokio::task::JoinSet;

use super::support::{ADMIN, Routers, command, run};

#[tokio::test]
async fn status_is_0_if_all_is_well_and_1_if_a_worker_is_drained_on_one_router() {
    let routers = Routers::start(2).await;
    routers.until_serving().await;
    let admins = routers.admins();
    let well = run(&["status", "--admin", &admins]).await;
    assert_eq!(well.code, 0, "{well:?}");
    assert!(well.stdout.contains("all is well"), "{well:?}");
    let model = well.line("sim ");
    assert!(model.contains("prefill_first") && model.matches("2 serving").count() == 2, "{model}");
    let told = run(&["status", "--admin", &admins, "--json"]).await.json();
    assert_eq!((&told["ok"], &told["config_differs"]), (&json!(true), &json!(false)));
    let replicas = told["replicas"].as_array().unwrap();
    assert_eq!(replicas.len(), 2);
    assert_eq!(replicas[0]["workers"]["decode"]["serving"], 2);
    assert_eq!(replicas[0]["config_hash"], replicas[1]["config_hash"]);

    let drained = Client::new(routers.routers[1].admin);
    drained.post_with("/admin/workers/d1/drain", &[], "").await;
    let ill = run(&["status", "--admin", &admins]).await;
    assert_eq!(ill.code, 1, "{ill:?}");
    let about = ill.line(&format!("{}: worker d1 of sim (", routers.name(1)));
    assert!(about.contains("an operator drains it"), "{ill:?}");
    let told = run(&["status", "--admin", &admins, "--json"]).await.json();
    assert_eq!(told["ok"], false);
    assert_eq!(told["replicas"][0]["needs_attention"], json!([]));
    assert_eq!(told["replicas"][1]["needs_attention"][0]["kind"], "draining");
}

#[tokio::test]
async fn status_warns_of_routers_with_different_configurations() {
    let top = |place: usize| format!("limits: {{ decisions_kept: {} }}", place + 100);
    let routers = Routers::start_with(2, ADMIN, top).await;
    let status = run(&["status", "--admin", &routers.admins()]).await;
    assert_eq!(status.code, 1, "{status:?}");
    assert!(status.stdout.contains("run different configurations"), "{status:?}");
}

#[tokio::test]
async fn status_warns_of_a_router_that_refuses_requests_because_of_load() {
    let top = |_| "limits: { in_flight_max: 1 }".to_owned();
    let routers = Routers::start_with(1, ADMIN, top).await;
    routers.until_serving().await;
    let (_events, _busy) = routers.endless(0).await;
    let http = Client::new(routers.routers[0].http);
    let mut status = run(&["status", "--admin", &routers.admins()]).await;
    assert_eq!(status.code, 0, "{status:?}");
    eventually("status says so", async || {
        assert_eq!(http.post(COMPLETIONS, &completion("too many")).await.status, 503);
        status = run(&["status", "--admin", &routers.admins()]).await;
        status.code == 1
    })
    .await;
    let about = status.line("sheds requests");
    assert!(about.contains("in_flight_max"), "{status:?}");
    let told = run(&["status", "--admin", &routers.admins(), "--json"]).await.json();
    assert_eq!(told["replicas"][0]["needs_attention"][0]["kind"], "sheds_requests", "{told}");
}

#[tokio::test]
async fn workers_lists_all_with_the_states_in_which_routers_see_them() {
    let routers = Routers::start(2).await;
    routers.until_serving().await;
    let drained = Client::new(routers.routers[0].admin);
    drained.post_with("/admin/workers/p0/drain", &[], "").await;
    let (_events, busy) = routers.endless(1).await;
    let listed = run(&["workers", "--admin", &routers.admins()]).await;
    assert_eq!(listed.code, 0, "{listed:?}");
    let ids: Vec<_> = listed.stdout.lines().skip(1).map(|line| &line[7..9]).collect();
    assert_eq!(ids, ["p0", "p1", "d0", "d1"], "{listed:?}");
    assert!(listed.stdout.contains("draining 1/2, serving 1/2"), "{listed:?}");
    let told = run(&["workers", "--admin", &routers.admins(), "--json"]).await.json();
    let of = |id: &str| {
        let all = told["workers"].as_array().unwrap();
        all.iter().find(|worker| worker["id"] == id).unwrap().clone()
    };
    assert_eq!(of(&busy)["requests"], 1);
    let states: Vec<_> =
        of("p0")["replicas"].as_array().unwrap().iter().map(|seen| seen["state"].clone()).collect();
    assert_eq!(states, ["draining", "serving"]);
}

#[tokio::test]
async fn workers_and_top_name_the_models_that_exist_if_the_chosen_one_does_not() {
    let routers = Routers::start(1).await;
    let admins = routers.admins();
    for command in [&["workers"][..], &["workers", "--json"], &["top", "--once"]] {
        let ran = run(&[command, &["--admin", &admins, "--model", "smi"]].concat()).await;
        assert_eq!((ran.code, ran.stdout.trim()), (65, ""), "{command:?}: {ran:?}");
        let says = "no router serves a model `smi`; there are: sim";
        assert!(ran.stderr.contains(says), "{command:?}: {ran:?}");
    }
    let known = run(&["top", "--once", "--admin", &admins, "--model", "sim"]).await;
    assert_eq!(known.code, 0, "{known:?}");
}

/// What pretends to be a router that has found this.
async fn pretended(needs_attention: Value) -> ScriptedServer {
    ScriptedServer::start(move |heard| {
        let reply = match heard.target.split('?').next().unwrap_or_default() {
            "/metrics" => return ScriptedReply::events(""),
            "/admin/attention" => json!({"needs_attention": needs_attention}),
            "/admin/workers" => json!({"workers": []}),
            "/admin/models" => json!({"models": [{"name": "m", "flow": "aggregated"}]}),
            _ => json!({"status": "ready"}),
        };
        ScriptedReply::json(200, &reply.to_string())
    })
    .await
}

#[tokio::test]
async fn status_names_routers_before_workers_notes_last_and_a_large_fleet_in_one_line() {
    let workers: Vec<String> = (0..64).map(|number| format!("w{number}")).collect();
    let needs = json!([
        {
            "kind": "slow", "is_note": false, "model": "m", "workers": ["w1"], "message": "slow: why",
        },
        {
            "kind": "no_tokenizer", "is_note": true, "model": "m", "message": "no KV routing: why",
            "advice": "set it",
        },
        {
            "kind": "events_cut_off", "is_note": false, "model": "m", "workers": workers,
            "message": "cut off", "advice": "look there",
        },
        {"kind": "reload_refused", "is_note": false, "message": "refused", "advice": "read it"},
    ]);
    let router = pretended(needs.clone()).await;
    let status = run(&["status", "--admin", &router.url()]).await;
    assert_eq!(status.code, 1, "{status:?}");
    let lines: Vec<_> = status.stdout.lines().skip_while(|line| *line != "refused").collect();
    let named = "64 workers of m (w0, w1, w2, w3, w4, w5, w6, w7, ...): cut off";
    assert_eq!(
        lines,
        [
            "refused",
            "  hint: read it",
            "worker w1 of m: slow: why",
            named,
            "  hint: look there",
            "model m: no KV routing: why",
            "  hint: set it",
        ]
    );
    // Replicas that say the same are not told apart.
    let other = pretended(needs.clone()).await;
    let admins = format!("{},{}", router.url(), other.url());
    let both = run(&["status", "--admin", &admins]).await;
    assert!(both.stdout.trim_end().ends_with(&lines.join("\n")), "{both:?}");

    let router = pretended(json!([needs[1]])).await;
    let status = run(&["status", "--admin", &router.url()]).await;
    assert!(status.code == 0 && status.stdout.contains("all is well"), "{status:?}");
}

#[tokio::test]
async fn status_names_a_key_file_that_fails_and_keys_that_have_expired() {
    let mut keys = Keys::empty();
    keys.expired("acme");
    let top = |_| format!("{}\ntenants: [ {{ name: acme }} ]", keys.auth());
    let routers = Routers::start_with(1, ADMIN, top).await;
    routers.until_serving().await;
    let admin = Client::new(routers.routers[0].admin);
    let needs = async || admin.get("/admin/attention").await.json()["needs_attention"].clone();
    let expired = needs().await;
    assert_eq!(expired[0]["kind"], "keys_expire", "{expired}");
    let message = expired[0]["message"].as_str().unwrap();
    assert!(message.contains("have expired: k-") && message.contains("of acme"), "{message}");
    let status = run(&["status", "--admin", &routers.admins()]).await;
    assert_eq!((status.code, status.line("auth:").contains("of acme")), (0, true), "{status:?}");

    std::fs::write(keys.path(), "keys: nonsense").unwrap();
    eventually("the file is named", async || needs().await[0]["kind"] == "key_file_unusable").await;
    let status = run(&["status", "--admin", &routers.admins()]).await;
    assert_eq!(status.code, 1, "{status:?}");
    assert!(status.line("auth: the key file").contains("stay valid"), "{status:?}");
}

#[cfg(feature = "nats")]
#[tokio::test]
async fn status_and_the_log_name_a_broker_that_cannot_be_reached() {
    let held = HeldPort::take();
    let broker = held.address().to_string();
    let top = |_| format!("quotas: {{ kind: nats, servers: ['nats://{broker}'] }}");
    let routers = Routers::start_with(1, ADMIN, top).await;
    let log = || std::fs::read_to_string(routers.files[0].path().join("log")).unwrap();
    eventually("the failure is logged", async || log().contains("cannot be connected to")).await;
    let log = log();
    let line = log.lines().find(|line| line.contains("cannot be connected to")).unwrap();
    assert!(line.contains(&broker) && line.contains("Connection refused"), "{line}");
    assert!(!log.contains("event of the broker's connection"), "{log}");
    let told = run(&["status", "--admin", &routers.admins(), "--json"]).await.json();
    let needs = told["replicas"][0]["needs_attention"].as_array().unwrap();
    assert!(needs.iter().any(|one| one["kind"] == "broker_disconnected"), "{told}");
}

/// What pretends to be a router, with a hostile name wherever a reply has room for one.
async fn hostile(id: &'static str) -> ScriptedServer {
    ScriptedServer::start(move |heard| {
        let worker = json!({
            "model": "m", "id": id, "role": "decode", "url": id, "state": "draining",
            "state_why": id, "breakers_open": [id], "parity": "mismatch", "parity_cause": id,
            "kv_routing": false,
            "needs_attention": [{"kind": id, "message": id, "advice": id}],
        });
        let live = json!({
            "schema": 1, "config_hash": id, "router_version": id, "ready": false,
            "not_ready_why": id, "models": [{"name": id, "flow": id, "workers": [worker]}],
            "decisions": [{"request_id": id, "model": id, "outcome": id, "decode_worker": id}],
        });
        let path = heard.target.split('?').next().unwrap_or_default();
        let reply = match path {
            "/ready" => return ScriptedReply::json(503, &json!({"reason": id}).to_string()),
            "/metrics" => {
                return ScriptedReply::events("splitrail_build_info{version=\"\u{1b}[2J\"} 1\n");
            }
            "/admin/live" => {
                return ScriptedReply::events(&format!("event: snapshot\ndata: {live}\n\n"));
            }
            "/admin/attention" => json!({"needs_attention": [{
                "kind": id, "model": id, "workers": [id], "message": id, "advice": id,
            }]}),
            "/admin/workers" => json!({"workers": [worker]}),
            "/admin/models" => json!({"models": [{"name": "m", "flow": id}]}),
            "/admin/reload" => json!({
                "result": id, "config_digest": id,
                "changes": [{"path": id, "old": id, "new": id}], "renewed": [id],
                "warnings": [{"file": id, "line": 1, "column": 1, "message": id, "hint": id}],
            }),
            "/admin/explain" => json!({
                "dry_run": true,
                "explanation": {
                    "model": id, "endpoint": id, "policy": {"kind": id},
                    "prompts": [{"stops": id, "gate": {(id): id}, "auto": {(id): 1}, "steps": [{
                        "step": id, "chosen": id, "candidates": [{
                            "worker": id, "chosen": true, "terms": {(id): 1},
                            "overlap_by_tier": {(id): id},
                        }],
                        "vetoed": [{"worker": id, "reasons": [id]}],
                    }]}],
                },
            }),
            drain if drain.ends_with("/drain") => json!({"worker": worker}),
            _ => return ScriptedReply::json(409, &json!({"error": {"message": id}}).to_string()),
        };
        ScriptedReply::json(200, &reply.to_string())
    })
    .await
}

#[tokio::test]
async fn text_from_routers_and_workers_cannot_control_the_terminal() {
    let id = "\u{1b}[2J\u{202e}d9\nd9";
    let post = hostile(id).await;
    let url = post.url();
    for arguments in [
        &["workers"][..],
        &["status"],
        &["drain", id, "--model", id],
        &["undrain", id],
        &["reload"],
        &["top", "--once"],
        &["explain", "--request-id", id],
    ] {
        let ran = run(&[arguments, &["--admin", &url]].concat()).await;
        let told = format!("{}{}", ran.stdout, ran.stderr);
        let steers = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!told.contains(steers), "{arguments:?}: {ran:?}");
        assert!(!told.lines().any(|line| line.starts_with("d9")), "{arguments:?}: {ran:?}");
        assert!(told.contains("\\u{1b}[2J"), "{arguments:?}: {ran:?}");
    }
}

#[tokio::test]
async fn explain_finds_the_router_that_served_a_request() {
    let routers = Routers::start(2).await;
    let http = Client::new(routers.routers[1].http);
    let headers = [("content-type", "application/json"), ("x-request-id", "served-by-the-second")];
    let body = completion(&prompt(40, "explained")).to_string();
    assert_eq!(http.post_with(COMPLETIONS, &headers, body).await.status, 200);
    let asked = ["explain", "--request-id", "served-by-the-second", "--admin", &routers.admins()];
    let explained = run(&asked).await;
    assert_eq!(explained.code, 0, "{explained:?}");
    assert!(explained.stdout.contains("served-by-the-second"), "{explained:?}");
    let unknown = run(&["explain", "--request-id", "x", "--admin", &routers.admins()]).await;
    assert_eq!(unknown.code, 65, "{unknown:?}");
}

#[tokio::test]
async fn explain_names_a_router_that_cannot_be_asked_and_may_know_the_request() {
    let routers = Routers::start(1).await;
    let http = Client::new(routers.routers[0].http);
    let headers = [("content-type", "application/json"), ("x-request-id", "served")];
    let body = completion(&prompt(40, "explained")).to_string();
    assert_eq!(http.post_with(COMPLETIONS, &headers, body).await.status, 200);
    let held = HeldPort::take();
    let gone = held.address().to_string();
    let admins = format!("{gone},{}", routers.admins());
    let line = format!("not asked: {gone} (nothing listens at {gone})");
    let explained = run(&["explain", "--request-id", "served", "--admin", &admins]).await;
    assert_eq!(explained.code, 0, "{explained:?}");
    assert!(explained.stdout.lines().any(|one| one == line), "{explained:?}");
    let json = run(&["explain", "--request-id", "served", "--admin", &admins, "--json"]).await;
    assert_eq!(json.json()["dry_run"], false, "{json:?}");
    assert!(json.stderr.contains(&line), "{json:?}");
    // The router that cannot be asked may have served the request.
    let unknown = run(&["explain", "--request-id", "x", "--admin", &admins]).await;
    assert_eq!(unknown.code, 69, "{unknown:?}");
    assert!(unknown.stderr.contains(&line), "{unknown:?}");
}

#[tokio::test]
async fn explain_asks_all_routers_at_the_same_time() {
    let reply = json!({
        "dry_run": true,
        "explanation": {"model": "m", "endpoint": "chat", "policy": {"kind": "p"}, "prompts": []},
    })
    .to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        reply.len()
    );
    let last = (head + &reply).into_bytes();
    let slow =
        ScriptedServer::start(move |_| ScriptedReply::Held { first: vec![], last: last.clone() })
            .await;
    let other = ScriptedServer::start(|_| ScriptedReply::json(404, "{}")).await;
    let admins = format!("{},{}", slow.url(), other.url());
    let arguments = ["explain", "--request-id", "x", "--admin", &admins].map(str::to_owned);
    let mut explaining = JoinSet::new();
    explaining.spawn(async move { run(&arguments.each_ref().map(String::as_str)).await });
    eventually("the second router is asked while the first one is silent", async || {
        slow.open() == 1 && other.heard().len() == 1
    })
    .await;
    slow.release();
    let explained = explaining.join_next().await.unwrap().unwrap();
    assert_eq!(explained.code, 0, "{explained:?}");
}

#[tokio::test]
async fn workers_that_are_down_are_named_once_and_in_one_line() {
    let routers = Routers::start(1).await;
    let admin = Client::new(routers.routers[0].admin);
    let held = [HeldPort::take(), HeldPort::take()];
    for (id, port) in ["d8", "d9"].into_iter().zip(&held) {
        let gone = port.address().to_string();
        let worker = json!({
            "id": id, "role": "decode", "url": format!("http://{gone}"),
            "kv_events": format!("tcp://{gone}"),
        });
        let body = json!({"model": "sim", "worker": worker}).to_string();
        let headers = [("content-type", "application/json")];
        assert_eq!(admin.post_with("/admin/workers", &headers, body).await.status, 201);
    }
    eventually("both are down", async || {
        let down = routers.workers(0).await;
        down.iter().filter(|worker| worker["state"] == "down").count() == 2
    })
    .await;
    let listed = run(&["workers", "--admin", &routers.admins(), "--json"]).await.json();
    let workers = listed["workers"].as_array().unwrap();
    let added = workers.iter().find(|worker| worker["id"] == "d9").unwrap();
    let needs = added["replicas"][0]["needs_attention"].as_array().unwrap();
    assert_eq!((needs.len(), &needs[0]["kind"]), (1, &json!("state")), "{listed}");
    let status = run(&["status", "--admin", &routers.admins(), "--json"]).await.json();
    let needs = status["replicas"][0]["needs_attention"].as_array().unwrap();
    let found: Vec<_> = needs.iter().filter(|one| one["kind"] == "state").collect();
    assert_eq!((found.len(), &found[0]["workers"]), (1, &json!(["d8", "d9"])), "{status}");
}

#[tokio::test]
async fn the_addresses_of_routers_come_from_the_environment_too() {
    let routers = Routers::start(2).await;
    let mut status = command(&["status", "--json"]);
    status.env("SPLITRAIL_ADMIN", routers.admins());
    let output = tokio::task::spawn_blocking(move || status.output().unwrap()).await.unwrap();
    let told = super::support::Ran::new(&output).json();
    assert_eq!(told["replicas"].as_array().unwrap().len(), 2);
    assert_eq!(told["replicas"][1]["admin"], json!(routers.name(1)));
}

#[tokio::test]
async fn each_address_of_a_host_name_can_be_a_router_of_its_own() {
    let routers = Routers::start(1).await;
    let port = routers.routers[0].admin.port();
    let host = format!("localhost:{port}");
    let one = run(&["status", "--admin", &host, "--json"]).await.json();
    assert_eq!(one["replicas"][0]["admin"], json!(host));
    let all = run(&["status", "--admin", &host, "--all-addresses", "--json"]).await.json();
    let names: Vec<_> = all["replicas"]
        .as_array()
        .unwrap()
        .iter()
        .map(|replica| replica["admin"].clone())
        .collect();
    assert!(names.contains(&json!(format!("127.0.0.1:{port}"))), "{names:?}");
}

#[tokio::test]
async fn explain_lists_past_requests_of_all_routers_by_worker_time_and_slowness() {
    let routers = Routers::start(2).await;
    for (place, id) in ["first", "second"].into_iter().enumerate() {
        let http = Client::new(routers.routers[place].http);
        let headers = [("content-type", "application/json"), ("x-request-id", id)];
        let body = completion(&prompt(40, id)).to_string();
        assert_eq!(http.post_with(COMPLETIONS, &headers, body).await.status, 200);
    }
    let admins = routers.admins();
    let ran = async |arguments: &[&str]| {
        let ran = run(&[&["explain", "--admin", &admins], arguments].concat()).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        ran
    };
    let ids = |ran: &super::support::Ran| -> Vec<String> {
        let rows = ran.stdout.lines().skip(3);
        rows.map(|row| row.split_whitespace().nth(1).unwrap().to_owned()).collect()
    };
    let newest = ran(&["--since", "10m"]).await;
    assert_eq!(ids(&newest), ["second", "first"], "{newest:?}");
    assert!(newest.stdout.starts_with("2 requests, the newest first"), "{newest:?}");
    let mut slowest = ids(&ran(&["--slowest"]).await);
    slowest.sort();
    assert_eq!(slowest, ["first", "second"]);
    let of_first = &ran(&["--since", "10m", "--json"]).await.json()["decisions"][1];
    let worker = of_first["decode_worker"].as_str().unwrap();
    assert!(ids(&ran(&["--worker", worker]).await).contains(&"first".to_owned()));
    for nothing in [&["--failed"][..], &["--worker", "d9"], &["--at", "2026-01-01T00:00:00Z"]] {
        let found = ran(nothing).await;
        assert!(found.stdout.starts_with("no such request is kept"), "{found:?}");
    }
    let explained = ran(&["--request-id", "first"]).await;
    assert!(explained.stdout.starts_with("served by "), "{explained:?}");
    assert!(explained.stdout.contains("blocks"), "{explained:?}");
    let both = run(&["explain", "--admin", &admins, "--failed", "--request-id", "x"]).await;
    assert_eq!(both.code, 64, "{both:?}");
}
