//! What replies of engines say: events, choices and usage, by the dialect of each API; and how the
//! replies to the prompts of a batch are merged.

pub mod choices;
pub mod dialect;
pub mod event_template;
pub mod merge;
pub mod openai_chunk;
pub mod output_text;
