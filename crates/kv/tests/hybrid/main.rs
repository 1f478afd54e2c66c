//! Workers with several cache groups: how much of a prompt they use.
#![allow(clippy::unwrap_used)]

mod engine;
mod recordings;
mod rule;
mod several;
mod twin;
