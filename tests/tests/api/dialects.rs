//! `/v1/responses` and `/v1/messages`: another dialect's words for what a chat is.

mod support {
    pub(crate) use serde_json::{Value, json};
    pub(crate) use splitrail_tests::dialect::{
        BOTH, MESSAGES, RESPONSES, ask, chat_of, in_chat_words, of_events, request, text_of,
    };
    pub(crate) use splitrail_tests::trial::{CHAT, prompt, streamed};
    pub(crate) use splitrail_tests::{Cluster, Spec, Trial};
}

mod failures;
mod refusals;
mod replies;
