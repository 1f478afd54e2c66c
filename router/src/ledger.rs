//! What was predicted and what happened: decision records and counters.

pub mod counts;
pub mod decisions;
pub mod spent;
