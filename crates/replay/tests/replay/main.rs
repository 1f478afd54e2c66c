//! Policies over whole traces.
#![allow(missing_docs, clippy::unwrap_used)]

mod ours;
mod policies;
