//! The router on simulated engines puts policies in the order in which a replay of what it
//! recorded puts them: both decide by the same code.

use std::process::{Command, Stdio};

use serde_json::Value;
use splitrail_tests::binary::built;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};
use tokio::task::JoinSet;

const CONVERSATIONS: usize = 6;
const TURNS: usize = 5;
const PREFILL: usize = 3;

/// How much of the prompts was cached, by the engines' word, and what the router recorded.
async fn live(policy: &'static str) -> (f64, tempfile::TempDir) {
    let spec = Spec {
        prefill: PREFILL,
        decode: 1,
        policy,
        top: "record: { path: record.jsonl }\n".into(),
        ..Spec::default()
    };
    let cluster = std::sync::Arc::new(Cluster::start(spec).await);
    let mut cached = (0, 0);
    for turn in 1..=TURNS {
        let mut turns = JoinSet::new();
        for conversation in 0..CONVERSATIONS {
            let cluster = std::sync::Arc::clone(&cluster);
            turns.spawn(async move {
                let text = prompt(40 * turn, &format!("c{conversation}w"));
                let reply = cluster.http.post(COMPLETIONS, &completion(&text)).await;
                assert_eq!(reply.status, 200, "{}", reply.text());
                let usage = reply.json()["usage"].clone();
                let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
                (cached, usage["prompt_tokens"].as_u64().unwrap())
            });
        }
        for (hit, tokens) in turns.join_all().await {
            cached = (cached.0 + hit, cached.1 + tokens);
        }
        // The next turn comes when the answers have been read.
        cluster.settle().await;
    }
    cluster.quiet().await;
    let Ok(cluster) = std::sync::Arc::try_unwrap(cluster) else { panic!("somebody has it still") };
    let Cluster { running, files, engines: _engines, .. } = cluster;
    assert_eq!(running.drain().await, 0);
    (cached.0 as f64 / cached.1 as f64, files)
}

/// The same traffic under each policy, in virtual time.
fn replayed(files: &tempfile::TempDir, policies: &[&str]) -> Vec<f64> {
    let mut command = Command::new(built("splitrail"));
    command.current_dir(files.path()).stdin(Stdio::null()).env_remove("RUST_LOG");
    command.args(["replay", "--trace", "record.jsonl", "--prefill", "3", "--decode", "1"]);
    command.args(["--capacity-blocks", "inf", "--json", "-"]);
    for policy in policies {
        command.args(["--policy", policy]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows =
        told.as_array().or_else(|| told["rows"].as_array()).unwrap_or_else(|| panic!("{told}"));
    rows.iter().map(|row| row["hit_percent"].as_f64().unwrap() / 100.0).collect()
}

#[tokio::test]
async fn the_router_and_a_replay_of_its_record_order_policies_alike() {
    // At such a temperature, costs make no difference.
    const RANDOM: &str = r#"{"kind": "kv_overlap", "temperature": 1000000}"#;
    let (random, _files) = live(RANDOM).await;
    let (predicted, files) = live("{ kind: predicted_ttft }").await;
    let told = replayed(&files, &[RANDOM, "predicted_ttft"]);
    let [random_replayed, predicted_replayed] = told[..] else { panic!("{told:?}") };
    assert!(predicted > random, "live: {predicted} to {random}");
    assert!(predicted_replayed > random_replayed, "replayed: {told:?}");
    // Of what can be found at all, the policy that goes by predictions finds most, in both.
    let best = (0..TURNS).sum::<usize>() as f64 / (1..=TURNS).sum::<usize>() as f64;
    assert!(
        predicted > 0.8 * best && predicted_replayed > 0.8 * best,
        "{predicted} {told:?} {best}"
    );
}
