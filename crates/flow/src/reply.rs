//! Passes replies on to clients, and continues those whose engine was lost.

pub mod detail;
pub(crate) mod event_reader;
pub mod keep_alive;
pub(crate) mod migrate;
pub mod relay;
mod text_tokens;
