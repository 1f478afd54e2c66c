//! A front door for LLM clusters with disaggregated prefill and decode.

pub mod prompt;
