//! The file of decisions that a replay reads: one line per prompt, in a trace's words.

use serde_json::{Value, json};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

fn lines(cluster: &Cluster) -> Vec<Value> {
    let text = std::fs::read_to_string(cluster.files.path().join("record.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn recording(more: &str) -> Spec {
    Spec { top: format!("record: {{ path: record.jsonl{more} }}\n"), ..Spec::default() }
}

#[tokio::test]
async fn every_prompt_has_a_line_that_reads_as_a_trace_and_says_what_was_decided() {
    let cluster = Cluster::start(recording("")).await;
    let body = completion(&prompt(60, "secret"));
    let cold = cluster.http.post(COMPLETIONS, &body).await;
    cluster.settle().await;
    let warm = cluster.http.post(CHAT, &streamed(&chat(&prompt(60, "secret")))).await;
    assert_eq!((cold.status.as_u16(), warm.status.as_u16()), (200, 200));
    let mut batch = body.clone();
    batch["prompt"] = json!([prompt(20, "x"), prompt(20, "y")]);
    cluster.http.post(COMPLETIONS, &batch).await;
    let refused = cluster.http.post(COMPLETIONS, &json!({"model": "sim", "n": -1})).await;
    assert_eq!(refused.status, 400);
    cluster.quiet().await;
    let Cluster { running, files, engines: _engines, .. } = cluster;
    assert_eq!(running.drain().await, 0, "what is queued is written before the end");
    let text = std::fs::read_to_string(files.path().join("record.jsonl")).unwrap();
    assert!(!text.contains("secret"), "no content");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4, "what was never placed has no line");
    let first = &lines[0];
    let decision = &first["decision"];
    assert_eq!(first["input_length"], decision["prompt_tokens"]);
    assert_eq!(first["output_length"], 12);
    let blocks = first["hash_ids"].as_array().unwrap();
    assert_eq!(blocks.len() as u64, decision["prompt_blocks"].as_u64().unwrap());
    assert!(blocks.iter().all(|id| id.as_u64().unwrap() < 1 << 53));
    assert_eq!(first["block_size"], 16);
    assert_eq!(decision["prefill_worker"], cold.route("prefill").unwrap());
    let streamed = &lines[1];
    assert!(streamed["ttft_ms"].as_f64().unwrap() <= streamed["total_ms"].as_f64().unwrap());
    assert!(first["ttft_ms"].is_null(), "the first token of a whole reply is not seen");
    assert!(first["stages_ms"]["prefill"].as_f64().unwrap() > 0.0);
    assert_eq!(
        (&lines[2]["decision"]["prompt_index"], &lines[3]["decision"]["prompt_index"]),
        (&json!(0), &json!(1))
    );
    assert!(lines.windows(2).all(|pair| {
        pair[0]["timestamp"].as_u64().unwrap() <= pair[1]["timestamp"].as_u64().unwrap()
    }));
}

#[tokio::test]
async fn a_sample_of_nothing_writes_nothing_and_a_prompt_that_returns_has_the_same_names() {
    let none = Cluster::start(recording(", sample: 0.0")).await;
    let body = completion(&prompt(40, "z"));
    assert_eq!(none.http.post(COMPLETIONS, &body).await.status, 200);
    none.quiet().await;
    assert_eq!(lines(&none), Vec::<Value>::new());
    let all = Cluster::start(recording("")).await;
    let mut longer = body.clone();
    longer["prompt"] = json!(format!("{}{}", body["prompt"].as_str().unwrap(), prompt(30, "w")));
    for body in [&body, &longer] {
        assert_eq!(all.http.post(COMPLETIONS, body).await.status, 200);
    }
    splitrail_tests::cluster::eventually("two lines", async || lines(&all).len() == 2).await;
    let ids = |line: usize| lines(&all)[line]["hash_ids"].as_array().unwrap().clone();
    let (short, long) = (ids(0), ids(1));
    let shared = short.iter().zip(&long).take_while(|(a, b)| a == b).count();
    assert!(shared + 1 >= short.len() && long.len() > short.len(), "{shared} of {}", short.len());
}
