//! Every connector carries a prompt from prefill to decode, in its own way, to the same
//! answer.

mod answers;
mod failures;
mod legs;

use serde_json::{Value, json};
use splitrail_sim::KvConnector;
use splitrail_tests::Spec;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, chat, completion, generate, generated_ids, prompt, token_ids,
};

const CONNECTORS: [KvConnector; 4] =
    [KvConnector::Nixl, KvConnector::SharedStorage, KvConnector::Mooncake, KvConnector::Sglang];

/// A model with so many workers of each kind.
fn pd(connector: KvConnector, prefill: usize, decode: usize) -> Spec {
    Spec { connector, prefill, decode, ..Spec::default() }
}

/// A request of each endpoint, with prompts of their own per `salt`.
fn requests(salt: u32) -> [(&'static str, Value); 3] {
    [
        (CHAT, chat(&prompt(30, &format!("c{salt}x")))),
        (COMPLETIONS, completion(&prompt(40, &format!("d{salt}x")))),
        (GENERATE, generate(&token_ids(130, salt))),
    ]
}

/// What a choice says, in a whole reply or in a stream's chunks: text, or token ids.
fn said(path: &str, replies: &[Value], streamed: bool, index: usize) -> String {
    match (path, streamed) {
        (GENERATE, _) => json!(generated_ids(replies, index as u64)).to_string(),
        (_, true) => streamed_text(replies, index as u64),
        (_, false) => whole_text(&replies[0], index),
    }
}

/// Sets a member of the sampling parameters, wherever the endpoint keeps them.
fn sample(path: &str, body: &mut Value, key: &str, value: Value) {
    match path {
        GENERATE => body["sampling_params"][key] = value,
        _ => body[key] = value,
    }
}
