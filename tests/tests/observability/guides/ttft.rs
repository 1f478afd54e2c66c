//! [Why is the time to first token high?](../../../docs/guides/high-ttft.md), without the leaves about
//! single workers.

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::RESPONSES;
use splitrail_tests::live::LiveStream;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::walk::{Values, Walk, fresh, only, value};

const PAGE: &str = "high-ttft";

impl Walk {
    /// Follows the first look of step 1: page and terminal show that this part is the largest.
    async fn first_look_shows(&self, part: &str) {
        self.page.says(1, "A first look is the panel", "`splitrail top`");
        let first = format!("\nTTFT parts {part} ");
        self.run(1, "splitrail top --once", |shown| shown.contains(&first)).await;
        // What the panel draws.
        let mut live = LiveStream::open(&self.admin, &[]).await;
        let seen = live.until(|seen| seen["models"][0]["stages_ms"].is_object()).await;
        let stages = seen["models"][0]["stages_ms"].as_object().unwrap().iter();
        let largest =
            stages.max_by(|(_, a), (_, b)| a.as_f64().unwrap().total_cmp(&b.as_f64().unwrap()));
        assert_eq!(largest.unwrap().0, part, "{seen}");
        assert!(seen["models"][0]["hand_off_ms"].as_f64().unwrap() > 0.0, "{seen}");
    }

    /// Follows step 1: the largest part must be this one, and the page must lead to `next`.
    pub(crate) async fn largest_part_is(&self, part: &str, next: &str) {
        let name = if part == "queue_wait" { "queue_wait_seconds" } else { part };
        self.page.says(1, &format!("| `{name}`"), next);
        eventually(&format!("step 1: {part} is the largest part"), async || {
            let mut parts: Values = Vec::new();
            let waits = self.ask(1, "queue_wait_seconds_bucket").await;
            parts.extend(waits.into_iter().map(|(_, wait)| (json!({"stage": "queue_wait"}), wait)));
            parts.extend(self.ask(1, "engine_stage_seconds_bucket").await);
            parts.extend(self.ask(1, "splitrail_stage_seconds_bucket").await);
            let largest = parts.iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
            largest.is_some_and(|(labels, seconds)| labels["stage"] == part && *seconds > 0.2)
        })
        .await;
        // Its window is another one than that of the parts, which were asked for before.
        let is_high = |ttft: &Values| ttft.iter().any(|(_, seconds)| *seconds > 0.2);
        self.until(1, "splitrail_ttft_seconds_bucket", is_high).await;
    }
}

#[tokio::test]
async fn a_long_queue_leads_to_a_fleet_that_is_too_small() {
    let mut walk = Walk::start(PAGE, Spec::queued("max_waiting: 100")).await;
    walk.load(8, |client, turn| fresh(60, client, turn));
    walk.largest_part_is("queue_wait", "[step 2]").await;
    walk.page.says(
        2,
        "prompt tokens to compute grow on all prefill workers",
        "more prefill workers",
    );
    walk.until(2, "splitrail_queue_depth", |depth| only(depth) >= 3.0).await;
    let tokens = [("role", "prefill")];
    walk.until(2, "splitrail_worker_prefill_tokens", |now| value(now, &tokens) > 100.0).await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_queue_before_idle_workers_leads_to_why_they_are_excluded() {
    let spec = Spec {
        prefill: 2,
        decode: 1,
        policy: "{ kind: predicted_ttft }",
        model: "queue: {}\ncosts: { prefill_us_per_token: 1000 }".into(),
        engine: |name, config| {
            if name.starts_with('p') {
                config.prefill_us_per_token = 1000;
            }
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    assert_eq!(walk.admin.post_with("/admin/workers/p1/drain", &[], "").await.status, 200);
    walk.load(8, |client, turn| fresh(60, client, turn));
    walk.largest_part_is("queue_wait", "[step 2]").await;
    walk.page.says(2, "the queue is long, and workers are idle", "[step 3]");
    walk.until(2, "splitrail_queue_depth", |depth| only(depth) >= 3.0).await;
    let idle = |worker: &Value| worker["requests"] == 0 && worker["state"] == "draining";
    walk.worker(3, "p1", idle).await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn refused_requests_lead_to_the_bound_that_refuses_them() {
    let mut walk = Walk::start(PAGE, Spec::queued("max_waiting: 1")).await;
    walk.load(6, |client, turn| fresh(60, client, turn));
    walk.page.says(2, "requests are shed", "`reason` says by which bound");
    let full = [("reason", "queue_full")];
    walk.until(2, "splitrail_shed_total", |shed| value(shed, &full) > 0.0).await;
    walk.fires(&[
        "SplitrailRequestsShed",
        "SplitrailQueueSaturated",
        "SplitrailErrorBudgetBurnsFast",
        "SplitrailErrorBudgetBurnsSlowly",
    ])
    .await;
}

#[tokio::test]
async fn a_full_kv_cache_leads_to_more_decode_workers() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        engine: |name, config| {
            config.decode_us_per_step = 20_000;
            if name == "d0" {
                config.kv_blocks = 64;
            }
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(8, |client, turn| {
        let mut body = fresh(30, client, turn);
        (body["max_tokens"], body["ignore_eos"]) = (200.into(), true.into());
        body
    });
    walk.largest_part_is("first_token", "[step 5]").await;
    walk.page.says(5, "tokens themselves come slowly", "[step 2]");
    walk.page.says(2, "used KV blocks of decode workers near 1", "more decode workers");
    let d0 = [("worker", "d0")];
    walk.until(2, "splitrail_worker_kv_blocks", |used| value(used, &d0) > 0.8).await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn long_prompts_lead_to_a_fleet_that_must_grow() {
    let spec = Spec {
        prefill: 2,
        decode: 1,
        policy: "{ kind: round_robin }",
        engine: |name, config| {
            if name.starts_with('p') {
                config.prefill_us_per_token = 1000;
            }
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(2, |client, turn| fresh(20, client, turn));
    let length = "splitrail_request_prompt_tokens_bucket";
    let before = only(&walk.until(4, length, |tokens| only(tokens) > 0.0).await);
    walk.unload().await;
    walk.load(3, |client, turn| fresh(120, client, turn));
    walk.first_look_shows("prefill").await;
    walk.largest_part_is("prefill", "[step 3]").await;
    walk.page.says(3, "all prefill workers are slow alike", "[step 4]");
    walk.until(3, "splitrail_worker_leg_seconds_bucket", |legs| {
        let [p0, p1] = ["p0", "p1"].map(|p| value(legs, &[("worker", p), ("leg", "prefill")]));
        p0.min(p1) > 0.1 && p0.max(p1) < 2.0 * p0.min(p1)
    })
    .await;
    walk.until(4, length, |tokens| only(tokens) > 2.0 * before).await;
    // The share of cached tokens was low before, too.
    let cached = walk.until(4, "splitrail:cached_tokens:ratio_rate5m", |now| !now.is_empty()).await;
    assert!(only(&cached) < 0.2, "{cached:?}");
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_slow_transfer_leads_to_the_hand_off() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        engine: |_, config| {
            (config.decode_us_per_step, config.transfer_us_per_block) = (5_000, 40_000);
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(2, |client, turn| fresh(60, client, turn));
    walk.largest_part_is("first_token", "[step 5]").await;
    walk.page.says(
        5,
        "the hand-off takes much longer than one step of decoding",
        "the transfer of KV is slow",
    );
    let hand_off = walk.until(5, "splitrail_hand_off_seconds_bucket", |now| only(now) > 0.3).await;
    let steps = walk.until(5, "splitrail_inter_token_seconds_bucket", |now| only(now) > 0.0).await;
    assert!(only(&hand_off) > 4.0 * only(&steps), "{hand_off:?}, {steps:?}");
    walk.fires(&[]).await;
}

#[tokio::test]
async fn slow_tokens_lead_to_busy_decode_workers() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        engine: |name, config| {
            if name == "d0" {
                config.decode_us_per_step = 300_000;
            }
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(3, |client, turn| {
        let mut body = fresh(20, client, turn);
        body["max_tokens"] = 4.into();
        body
    });
    walk.largest_part_is("first_token", "[step 5]").await;
    walk.page.says(5, "tokens themselves come slowly", "decode workers are busy");
    walk.until(5, "splitrail_inter_token_seconds_bucket", |now| only(now) > 0.2).await;
    walk.fires(&[]).await;
}

/// The router's configuration with another value of a key of a worker, which is a text.
fn with_worker(yaml: &str, worker: &str, key: &str, text: &str) -> String {
    let line = yaml.find(&format!("id: {worker},")).unwrap();
    let begin = line + yaml[line..].find(&format!("{key}: \"")).unwrap() + key.len() + 3;
    let end = begin + yaml[begin..].find('"').unwrap();
    format!("{}{text}{}", &yaml[..begin], &yaml[end..])
}

#[tokio::test]
async fn a_missing_prefill_worker_leads_to_local_prefills() {
    // Nobody is where the prefill worker should be.
    let spec = Spec { prefill: 1, decode: 1, ..Spec::default() };
    let away = |yaml: &str| with_worker(yaml, "p0", "url", "http://127.0.0.1:1");
    let mut walk = Walk::start_with(PAGE, spec, away).await;
    walk.load(1, |client, turn| fresh(40, client, turn));
    walk.page.says(5, "`no_prefill`", "decode workers compute prompts");
    let reason = [("reason", "no_prefill")];
    walk.until(5, "splitrail_local_prefills_total", |now| value(now, &reason) > 0.0).await;
    walk.fires(&["SplitrailNoPrefillWorker", "SplitrailWorkerDown"]).await;
}

#[tokio::test]
async fn a_missing_hand_off_is_a_local_prefill_or_a_failure_by_endpoint() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        engine: |name, config| config.names_hand_offs = name != "p0",
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load_at(RESPONSES, 1, |client, turn| {
        let text = prompt(40, &format!("r{client}t{turn}w"));
        json!({"model": "sim", "max_output_tokens": 4, "input": text})
    });
    walk.page.says(5, "`no_hand_off`", "`/v1/responses` and `/v1/messages` alone");
    let reason = [("reason", "no_hand_off")];
    walk.until(5, "splitrail_local_prefills_total", |now| value(now, &reason) > 0.0).await;
    walk.fires(&["SplitrailDecodeWithoutHandOff"]).await;
    walk.fault("p0", FaultKind::NoHandOff);
    walk.load(1, |client, turn| fresh(40, client, turn));
    walk.page.says(5, "returns no hand-off fails with `engine_failed`", "[step 3]");
    let failed = [("worker", "p0"), ("reason", "engine_failed")];
    walk.until(3, "splitrail_worker_leg_failures_total", |now| value(now, &failed) > 0.0).await;
    walk.fires(&[
        "SplitrailDecodeWithoutHandOff",
        "SplitrailBreakerOpen",
        "SplitrailNoPrefillWorker",
    ])
    .await;
}

#[tokio::test]
async fn rejections_of_decode_workers_lead_to_the_gate() {
    for (keys, outcome, advice) in [
        ("gate: { kind: engine, index_first: false }", "rejected", "one round trip"),
        ("gate: { kind: router }", "unsupported", "`--kv-events-config`"),
    ] {
        let spec = Spec {
            prefill: 1,
            decode: 1,
            flow: "decode_first",
            model: format!("cache_hit_threshold: 0.5\n{keys}"),
            ..Spec::default()
        };
        let mut walk = Walk::start_with(PAGE, spec, |yaml| match outcome {
            // What the decode worker holds is not known.
            "unsupported" => with_worker(yaml, "d0", "kv_events", "tcp://127.0.0.1:1"),
            _ => yaml.to_owned(),
        })
        .await;
        walk.load(1, |client, turn| fresh(40, client, turn));
        walk.page.says(6, &format!("many `{outcome}`"), advice);
        let of_outcome = [("outcome", outcome)];
        walk.until(6, "splitrail_decode_first_total", |now| value(now, &of_outcome) > 0.0).await;
        let alerts = if outcome == "rejected" { &[][..] } else { &["SplitrailIndexEventsCutOff"] };
        walk.fires(alerts).await;
        if outcome == "rejected" {
            let tries = [("stage", "decode_try")];
            walk.page.says(1, "| `decode_try`", "[step 6]");
            walk.until(1, "engine_stage_seconds_bucket", |now| value(now, &tries) > 0.0).await;
        }
    }
}

#[tokio::test]
async fn a_router_without_a_processor_shows_in_its_lag() {
    let mut walk = Walk::start(PAGE, Spec::aggregated(1)).await;
    walk.load(1, |client, turn| fresh(10, client, turn));
    walk.page.says(7, "A delay of more than a few milliseconds", "raise its limit");
    let lag = "splitrail_runtime_lag_seconds_bucket";
    eventually("step 7: the lag is seen", async || {
        // The system takes the processor away for a while.
        walk.router.signal("STOP");
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
        walk.router.signal("CONT");
        walk.http.get("/health").await;
        only(&walk.ask(7, lag).await) > 0.05
    })
    .await;
    walk.until(7, "process_cpu_seconds_total", |cpu| only(cpu) > 0.0).await;
    walk.fires(&["SplitrailRuntimeLags"]).await;
}

#[tokio::test]
async fn one_request_is_explained_by_its_header_and_by_its_id() {
    let walk = Walk::start(PAGE, Spec::default()).await;
    // Its body comes in two parts.
    let body = completion(&prompt(40, "slow")).to_string();
    let (first, rest) = body.split_at(body.len() / 2);
    let mut socket = TcpStream::connect(walk.router.http).await.unwrap();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         x-request-id: slow-1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{first}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    // What is slow is the client.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    socket.write_all(rest.as_bytes()).await.unwrap();
    let mut reply = String::new();
    socket.read_to_string(&mut reply).await.unwrap();
    let timing = reply.lines().find_map(|line| line.strip_prefix("server-timing: ")).unwrap();
    let parts: Vec<(&str, f64)> = timing
        .split(", ")
        .filter_map(|part| part.split_once(";dur="))
        .map(|(name, ms)| (name, ms.parse().unwrap()))
        .collect();
    let largest = parts.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!(largest.0, "receive", "{timing}");
    walk.page.says(1, "| `receive`", "a slow client or network");
    let example = walk.page.line(1, "server-timing: ");
    for (name, _) in parts {
        assert!(example.contains(&format!("{name};dur=")), "{name} is not in the page's example");
    }
    let names = [("ID", "slow-1")];
    let told = walk.run_with(8, "splitrail explain", &names, |told| told.contains("d0")).await;
    for part in ["p0", "p1", "d0", "d1", "prefill", "decode"] {
        assert!(told.contains(part), "{told}");
    }
    walk.fires(&[]).await;
}
