//! The preemption guard: what was handed over passes it, however short and often asked for.

use serde_json::json;
use splitrail_sim::{FaultKind, KvConnector, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::trial::{
    COMPLETIONS, GENERATE, Reference, completion, generate, generated_ids, prompt, token_ids,
};
use splitrail_tests::{Spec, Trial};

use super::support::*;

#[tokio::test]
async fn a_guard_turns_no_prompt_away_that_fills_no_block() {
    let reference = Reference::start().await;
    let model = "gate: { kind: engine, index_first: false, preemption_guard: 0.001 }";
    for connector in [
        KvConnector::Nixl,
        KvConnector::NixlPush,
        KvConnector::SharedStorage,
        KvConnector::Mooncake,
    ] {
        let mut trial = Trial::start(Spec { connector, ..with_model(model) }).await;
        for text in ["x", "fifteen tokens", "an exact block.", "a block and a few more tokens"] {
            for n in [1, 3] {
                let mut body = completion(text);
                let expected = reference.text(COMPLETIONS, &body).await;
                body["n"] = json!(n);
                body["cache_hit_threshold"] = json!(0.9);
                let reply = trial.post("ok", COMPLETIONS, &body).await;
                assert_eq!(reply.status, 200, "{connector:?} {text:?} x{n}: {}", reply.text());
                let reply = reply.json();
                for index in 0..n {
                    assert_eq!(whole_text(&reply, index), expected, "{connector:?} {text:?}");
                }
            }
        }
        assert_eq!(trial.retries("decode").await, 0.0, "{connector:?}: nothing was preempted");
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_guard_turns_no_prompt_away_that_a_storage_of_whole_prompts_does_not_find() {
    let reference = Reference::start().await;
    let model = "gate: { kind: engine, index_first: false, preemption_guard: 0.001 }";
    let engine = |_: &str, config: &mut SimConfig| config.storage.find_whole_prompts_only();
    let connector = KvConnector::SharedStorage;
    let mut trial = Trial::start(Spec { connector, engine, ..with_model(model) }).await;
    for tokens in [47, 48, 49, 50] {
        let mut body = generate(&token_ids(tokens, tokens));
        let expected = reference.chunks(GENERATE, &body).await;
        body["cache_hit_threshold"] = json!(0.9);
        let reply = trial.post("ok", GENERATE, &body).await;
        assert_eq!(reply.status, 200, "{tokens} tokens: {}", reply.text());
        let generated = generated_ids(&[reply.json()], 0);
        assert_eq!(generated, generated_ids(&expected, 0), "{tokens} tokens");
    }
    assert_eq!(trial.retries("decode").await, 0.0, "nothing was preempted");
    // Of 49 tokens nothing was found.
    let totals = trial.cluster.engine("d0").state().totals;
    assert_eq!(totals.external_kv_transfer_tokens, 32 + 32 + 48);
    trial.finish().await;
}

#[tokio::test]
async fn a_guard_needs_no_flow_with_a_gate() {
    let reference = Reference::start().await;
    let model = "gate: { preemption_guard: 0.001 }";
    let mut trial = Trial::start(Spec { flow: "prefill_first", ..with_model(model) }).await;
    trial.fault("d0", FaultKind::Preempt, Some(1));
    let body = completion(&prompt(40, "guarded"));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
    let preempted = [("reason", "below_threshold")];
    assert_eq!(trial.cluster.metric("splitrail_retries_total", &preempted).await, 1.0);
    trial.finish().await;
}
