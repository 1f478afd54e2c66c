//! Which worker takes a request and why, and what is recorded of it.
#![allow(missing_docs, clippy::unwrap_used)]

mod adapters;
mod chat_template;
mod context_lengths;
mod engine_tokenizer;
mod explain;
mod hybrid;
mod policies_live;
mod predicted;
mod ranks;
mod record;
mod speculative_index;
mod tiers;
