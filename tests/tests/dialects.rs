//! `/v1/responses` and `/v1/messages`: another dialect's words for what a chat is.
#![allow(missing_docs, clippy::unwrap_used)]

mod support {
    pub(crate) use serde_json::{Value, json};
    pub(crate) use splitrail_tests::dialect::{
        BOTH, MESSAGES, RESPONSES, ask, chat_of, in_chat_words, of_events, request, text_of,
    };
    pub(crate) use splitrail_tests::trial::{CHAT, prompt, streamed};
    pub(crate) use splitrail_tests::{Cluster, Spec, Trial};
}

#[path = "dialects/answers.rs"]
mod answers;
#[path = "dialects/failures.rs"]
mod failures;
#[path = "dialects/refusals.rs"]
mod refusals;
