//! Simulated engines.
pub mod cache;
pub mod tokenizer;
