//! Behaviour of the engine dialects, on recorded bytes where there are any.
#![allow(clippy::unwrap_used)]

mod kv_events;
mod load;
mod nixl;
mod support;
mod usage;
