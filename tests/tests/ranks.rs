//! Data-parallel ranks: each is a place of its own, with its own cache and queue.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "ranks/chosen.rs"]
mod chosen;
#[path = "ranks/events.rs"]
mod events;
#[path = "ranks/flows.rs"]
mod flows;
#[path = "ranks/shim.rs"]
mod shim;
#[path = "ranks/support.rs"]
mod support;
#[path = "ranks/work.rs"]
mod work;
