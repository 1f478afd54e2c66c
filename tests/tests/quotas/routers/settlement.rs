//! What requests did cost, in replies, headers and ledger files.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::accounting::ledger_lines;
use splitrail_tests::client::Reply;
use splitrail_tests::trial::{COMPLETIONS, prompt};

use super::support::{Limited, Plan, ROUTERS, Routers, usage, within};

const TENANT: Limited = Limited { name: "acme", requests: 1000, tokens: 1_000_000 };

/// What uncached and cached prompt tokens and generated tokens count.
const WEIGHTS: [u64; 3] = [3, 1, 2];

/// Rounds of requests to all routers.
const ROUNDS: usize = 8;

fn cost(prompt: u64, cached: u64, output: u64) -> u64 {
    (prompt - cached) * WEIGHTS[0] + cached * WEIGHTS[1] + output * WEIGHTS[2]
}

fn cost_of(reply: &Reply) -> u64 {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let cached = usage(reply, "/prompt_tokens_details/cached_tokens");
    cost(usage(reply, "/prompt_tokens"), cached, usage(reply, "/completion_tokens"))
}

/// The cost of a request by its line in a ledger, which has all figures.
fn cost_in(line: &Value) -> u64 {
    let figure = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("{name} of {line}"));
    cost(figure("prompt_tokens"), figure("cached_tokens"), figure("completion_tokens"))
}

/// Requests of many kinds. Some prompts repeat, and replies end before `max_tokens`.
fn bodies(round: usize) -> [Value; 4] {
    let base = json!({ "model": "sim", "max_tokens": 60, "seed": round });
    let of = |more: Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let fresh = |salt: &str| prompt(30, &format!("{salt}{round} "));
    [
        of(json!({ "prompt": prompt(40, "common") })),
        of(json!({ "prompt": fresh("one") })),
        of(json!({ "prompt": [fresh("two"), prompt(40, "common")], "n": 2 })),
        json!({ "model": "sim", "prompt": fresh("three"), "stop": ["zzz"], "max_tokens": 3 }),
    ]
}

/// Begins a stream and leaves.
async fn cancel(routers: &Routers, router: usize) {
    let body = json!({ "model": "sim", "prompt": "left", "max_tokens": 4000, "stream": true, "ignore_eos": true });
    let authorization = routers.authorization(TENANT.name);
    let headers = [("authorization", authorization.as_str())];
    let mut stream = routers.client(router).stream_with(COMPLETIONS, &headers, &body).await;
    assert_eq!(stream.status, 200);
    stream.next().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_headers_and_ledgers_agree_to_the_token() {
    let engine = SimConfig { eos_one_in: 25, decode_us_per_step: 1000, ..SimConfig::default() };
    let weights = "{ uncached: 3, cached: 1, output: 2 }";
    let mut routers = Routers::start(Plan { tenants: &[TENANT], weights, engine }).await;
    let (mut tokens, mut requests) = (0, 0);
    for round in 0..ROUNDS {
        for router in 0..ROUTERS {
            for body in bodies(round) {
                let mut reply = routers.post(router, TENANT.name, &body).await;
                // A router that has no share yet refuses.
                within(20, "the request is admitted", async || {
                    if reply.status == 429 {
                        reply = routers.post(router, TENANT.name, &body).await;
                    }
                    reply.status != 429
                })
                .await;
                tokens += cost_of(&reply);
                requests += 1;
            }
            cancel(&routers, router).await;
            requests += 1;
        }
    }
    // Those who left pay for what had arrived when the router noticed.
    let lines_of_all = async || {
        let lines = |router| ledger_lines(&routers.ledger(router));
        (0..ROUTERS).flat_map(lines).collect::<Vec<Value>>()
    };
    within(20, "all requests are in the ledgers", async || {
        lines_of_all().await.len() as u64 == requests
    })
    .await;
    tokens += lines_of_all()
        .await
        .iter()
        .filter(|line| line["outcome"] != "ok")
        .map(cost_in)
        .sum::<u64>();
    // What the others have used is read from the broker a few seconds later.
    for router in 0..ROUTERS {
        within(20, "the headers have what all routers have used", async || {
            let told = async |unit: &str| {
                routers.told(router, TENANT.name, &format!("x-ratelimit-remaining-{unit}")).await
            };
            let used =
                (TENANT.requests - told("requests").await, TENANT.tokens - told("tokens").await);
            used == (requests, tokens)
        })
        .await;
    }
    let (mut written, mut lines) = (0, 0);
    for router in 0..ROUTERS {
        routers.stop(router).await;
        for line in ledger_lines(&routers.ledger(router)) {
            assert_eq!(line["tenant"], TENANT.name);
            written += cost_in(&line);
            lines += 1;
        }
    }
    assert_eq!((lines, written), (requests, tokens));
}
