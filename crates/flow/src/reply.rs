//! Makes the client's reply from the engine's: reads and edits events and whole replies, merges
//! those of a batch, and is the only place that decides the usage that clients see. No module of
//! the legs is imported here.

pub mod choices;
pub mod detail;
pub mod dialect;
pub(crate) mod event_reader;
pub(crate) mod event_template;
pub mod merge;
pub mod openai_chunk;
