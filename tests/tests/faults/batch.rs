//! A fault in one prompt of a batch: the batch is whole, or it is one error.

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    COMPLETIONS, Reference, SHORT_LEASE, Trial, broken_off, completion, error_of, prompt,
};

fn spec() -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        engine: |_, config| config.lease_ms = SHORT_LEASE.as_millis() as u64,
        ..Spec::default()
    }
}

fn prompts(salt: &str) -> Vec<String> {
    (0..4).map(|i| prompt(30 + i, &format!("{salt}{i}-"))).collect()
}

fn batch(prompts: &[String]) -> Value {
    let mut body = completion("");
    body["prompt"] = json!(prompts);
    body
}

async fn texts(reference: &Reference, prompts: &[String]) -> Vec<String> {
    let mut texts = Vec::new();
    for text in prompts {
        texts.push(reference.text(COMPLETIONS, &completion(text)).await);
    }
    texts
}

#[tokio::test]
async fn a_prompt_whose_worker_fails_is_retried_and_the_batch_is_complete() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(spec()).await;
    let faults = [
        ("p0", FaultKind::Status { status: 500 }),
        ("p1", FaultKind::Reset),
        ("p0", FaultKind::NoHandOff),
        ("d0", FaultKind::Status { status: 503 }),
        ("d1", FaultKind::Reset),
        ("d0", FaultKind::DieMidStream { after_chunks: 0 }),
    ];
    for (turn, (engine, fault)) in faults.into_iter().enumerate() {
        let prompts = prompts(&format!("h{turn}-"));
        let expected = texts(&reference, &prompts).await;
        trial.fault(engine, fault.clone(), Some(1));
        let reply = trial.post("ok", COMPLETIONS, &batch(&prompts)).await;
        assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
        let reply = reply.json();
        assert_eq!(reply["choices"].as_array().unwrap().len(), 4);
        trial.fault(engine, fault.clone(), Some(1));
        let mut events = trial.stream("ok", COMPLETIONS, &batch(&prompts)).await;
        let chunks = events.chunks().await;
        for (i, text) in expected.iter().enumerate() {
            assert_eq!(&whole_text(&reply, i), text, "{fault:?}");
            assert_eq!(&streamed_text(&chunks, i as u64), text, "{fault:?}");
        }
        trial.check().await;
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prompt_that_cannot_be_served_fails_the_batch_once_and_frees_the_rest() {
    let spec = Spec {
        decode: 1,
        // The other prompts are still being answered when one fails.
        engine: |name, config| {
            config.lease_ms = SHORT_LEASE.as_millis() as u64;
            if name == "d0" {
                config.decode_us_per_step = 20_000;
            }
        },
        ..spec()
    };
    let mut trial = Trial::start(spec).await;
    let mut body = batch(&prompts("i"));
    body["max_tokens"] = 2000.into();
    for stream in [false, true] {
        body["stream"] = stream.into();
        trial.fault("d0", FaultKind::Status { status: 500 }, Some(1));
        let reply = trial.post("engine_failed", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 502, "{}", reply.text());
        error_of(&reply.json());
        trial.check().await;
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn one_prompt_of_a_batch_too_long_is_the_clients_error() {
    let spec = Spec {
        engine: |_, config| {
            config.lease_ms = SHORT_LEASE.as_millis() as u64;
            config.max_model_len = 300;
        },
        ..spec()
    };
    let mut trial = Trial::start(spec).await;
    let mut prompts = prompts("j");
    prompts[2] = prompt(200, "long");
    let reply = trial.post("engine_rejected", COMPLETIONS, &batch(&prompts)).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    error_of(&reply.json());
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn one_prompt_lost_during_the_stream_ends_the_stream_with_one_error() {
    let spec = Spec {
        engine: |name, config| {
            if name.starts_with('d') {
                config.decode_us_per_step = 20_000;
            }
        },
        ..spec()
    };
    let mut trial = Trial::start(spec).await;
    let mut body = batch(&prompts("k"));
    body["max_tokens"] = 2000.into();
    trial.fault("d0", FaultKind::DieMidStream { after_chunks: 3 }, Some(1));
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    assert_eq!(events.status, 200);
    let (chunks, error) = broken_off(&events.rest().await);
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "no sum of a part");
    assert_eq!(error["code"], "decode_lost");
    // The other three were far from their end: they have been cancelled.
    trial.check().await;
    let aborted: u64 =
        ["d0", "d1"].map(|name| trial.cluster.engine(name).state().totals.aborted).iter().sum();
    assert_eq!(aborted, 4);
    trial.finish().await;
}
