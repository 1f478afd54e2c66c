//! Conversations: what is computed in each turn, and edited histories.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::Spec;
use splitrail_tests::client::whole_text;
use splitrail_tests::trial::{CHAT, COMPLETIONS, Reference, Trial, prompt};

use super::{BLOCK, bidirectional, complete, ids_of, of_ids, prompt_ids, reading, reads};

const ANSWER: usize = 100;

fn chat(messages: &[Value]) -> Value {
    json!({"model": "sim", "max_tokens": ANSWER, "temperature": 0, "messages": messages})
}

#[tokio::test]
async fn in_a_chat_of_ten_turns_prefill_computes_the_question_and_not_the_answer_before_it() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    let mut before = 0;
    for turn in 0..10 {
        let question = prompt(8, &format!("turn{turn}-"));
        messages.push(json!({"role": "user", "content": question}));
        let body = chat(&messages);
        trial.cluster.settle().await;
        let was = trial.cluster.engine("p0").state().totals;
        let reply = trial.post("ok", CHAT, &body).await;
        let reply = reply.json();
        let answer = whole_text(&reply, 0);
        assert_eq!(answer, reference.text(CHAT, &body).await, "turn {turn}");
        let now = trial.cluster.engine("p0").state().totals;
        let length = reply["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let computed = (now.local_compute_tokens - was.local_compute_tokens) as usize;
        let read = (now.external_kv_transfer_tokens - was.external_kv_transfer_tokens) as usize;
        // The KV of the last generated token was not computed.
        let known = if turn == 0 { 0 } else { (before + ANSWER - 1) / BLOCK * BLOCK };
        assert_eq!((computed, cached as usize), (length - known, known), "turn {turn}");
        assert_eq!(read, known - before / BLOCK * BLOCK, "turn {turn}");
        before = length;
        messages.push(json!({"role": "assistant", "content": answer}));
    }
    assert_eq!((reads(&trial, "read").await, reads(&trial, "failed").await), (9.0, 0.0));
    let told = |source: &'static str| [("leg", "prefill"), ("source", source)];
    let totals = trial.cluster.engine("p0").state().totals;
    for (source, tokens) in [
        ("read_back", totals.external_kv_transfer_tokens),
        ("local_cache_hit", totals.local_cache_hit_tokens),
        ("local_compute", totals.local_compute_tokens),
    ] {
        let counted = trial.cluster.metric("splitrail_prompt_tokens_total", &told(source)).await;
        assert_eq!(counted, tokens as f64, "{source}");
    }
    let pins = trial.cluster.engine("d0").state().totals;
    assert_eq!((pins.pins_made, pins.pins_read), (10, 9));
    trial.finish().await;
}

/// An edit of a history: what follows the common part.
struct Edit {
    keep: usize,
    tail: Vec<u64>,
}

fn edit(random: &mut StdRng, history: usize) -> Edit {
    let keep = random.random_range(0..=history);
    let tail = random.random_range(1..120);
    Edit { keep, tail: (0..tail).map(|_| random.random_range(3..250)).collect() }
}

/// Whatever is changed in a history, and wherever: the reply is that of an engine that has computed
/// everything by itself, and nothing but equal tokens in whole blocks is read (an engine that reads
/// otherwise refuses loudly).
#[tokio::test]
async fn a_history_that_was_edited_anywhere_is_read_up_to_the_edit() {
    const CASES: u64 = 60;
    let mut trial = Trial::start(reading(2, 2, "")).await;
    let mut reference = Trial::start(Spec::aggregated(1)).await;
    let mut read = 0;
    let seed: u64 = rand::random();
    for case in 0..CASES {
        let mut random = StdRng::seed_from_u64(seed.wrapping_add(case));
        let first = prompt_ids(random.random_range(1..200), case);
        let reply = complete(&mut trial, &first, random.random_range(1..150)).await;
        let history = [first, ids_of(&reply)].concat();
        let Edit { keep, tail } = edit(&mut random, history.len());
        let next = [&history[..keep], &tail].concat();
        let reply = trial.post("ok", COMPLETIONS, &of_ids(&next, 12)).await;
        let expected = complete(&mut reference, &next, 12).await;
        assert_eq!(ids_of(&reply.json()), ids_of(&expected), "seed {seed}, case {case}");
        let decisions = trial.cluster.decisions(reply.header("x-request-id")).await;
        if let Some(offer) = decisions[0]["ledger"]["legs"][0].get("read_back_offer") {
            let tokens = offer["tokens"].as_u64().unwrap() as usize;
            let common = history.iter().zip(&next).take_while(|(a, b)| a == b).count();
            let most = common.min(history.len() - 1).min(next.len() - 1) / BLOCK * BLOCK;
            assert_eq!(tokens, most, "seed {seed}, case {case}");
            read += 1;
        }
    }
    assert!(read > 5, "{read} of {CASES} read");
    assert_eq!(reads(&trial, "failed").await, 0.0, "seed {seed}");
    for name in ["p0", "p1", "d0", "d1"] {
        let totals = trial.cluster.engine(name).state().totals;
        assert_eq!((totals.failed, totals.pulls_refused), (0, 0), "{name}, seed {seed}");
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_prompt_of_another_adapter_reads_nothing() {
    let engine = |name: &str, config: &mut SimConfig| {
        bidirectional(name, config);
        config.adapters = vec!["lora-a".into(), "lora-b".into()];
    };
    let model = "adapters: [lora-a, lora-b]";
    let mut trial = Trial::start(Spec { engine, ..reading(1, 1, model) }).await;
    let first = prompt_ids(100, 1);
    let of = |ids: &[u64], model: &str| {
        let mut body = of_ids(ids, 90);
        body["model"] = model.into();
        body
    };
    let reply = trial.post("ok", COMPLETIONS, &of(&first, "lora-a")).await.json();
    let next = [first, ids_of(&reply), prompt_ids(20, 2)].concat();
    for other in ["lora-b", "sim"] {
        trial.post("ok", COMPLETIONS, &of(&next, other)).await;
    }
    let pins = trial.cluster.engine("d0").state().totals;
    assert_eq!((pins.pins_read, pins.pins_released), (0, 0));
    trial.post("ok", COMPLETIONS, &of(&next, "lora-a")).await;
    assert_eq!(trial.cluster.engine("d0").state().totals.pins_read, 1);
    trial.finish().await;
}

#[tokio::test]
async fn a_prompt_of_another_salt_reads_nothing() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let first = prompt_ids(100, 1);
    let salted = |ids: &[u64], salt: &str| {
        let mut body = of_ids(ids, 90);
        body["cache_salt"] = salt.into();
        body
    };
    let reply = trial.post("ok", COMPLETIONS, &salted(&first, "a")).await.json();
    let next = [first, ids_of(&reply), prompt_ids(20, 2)].concat();
    trial.post("ok", COMPLETIONS, &salted(&next, "b")).await;
    let pins = trial.cluster.engine("d0").state().totals;
    assert_eq!((pins.pins_read, pins.pins_released), (0, 0));
    trial.post("ok", COMPLETIONS, &salted(&next, "a")).await;
    assert_eq!(trial.cluster.engine("d0").state().totals.pins_read, 1);
    trial.finish().await;
}
