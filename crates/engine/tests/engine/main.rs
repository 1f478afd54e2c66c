//! Behaviour of the engine dialects, on recorded bytes where possible.
#![allow(clippy::unwrap_used)]

mod cache_groups;
mod check;
mod corpus;
mod fake_engine;
mod identity;
mod kv_event_forms;
mod kv_events;
mod load;
mod nixl;
mod odd_kv_events;
mod pinned;
mod prefix;
mod rendezvous;
mod replay;
mod subscription;
mod support;
mod usage;
mod wire;
