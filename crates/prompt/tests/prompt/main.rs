//! Prompts as engines see them: templates, tokenizers, and what is refused.
#![allow(missing_docs, clippy::unwrap_used)]

mod errors;
mod fast;
mod media;
mod parity;
mod rendered_size;
mod tokenizers;
