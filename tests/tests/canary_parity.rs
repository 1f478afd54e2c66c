//! A worker that does not agree with the router on prompts or KV blocks is found out when it
//! joins, with the cause; one whose cache is not what its events say is found out by its replies.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "canary_parity/causes.rs"]
mod causes;
#[path = "canary_parity/drift.rs"]
mod drift;
#[path = "canary_parity/serving.rs"]
mod serving;
#[path = "canary_parity/support.rs"]
mod support;
