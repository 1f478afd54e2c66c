//! Reloading the configuration while the router serves.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "reload/support.rs"]
mod support;

#[path = "reload/load.rs"]
mod load;
#[path = "reload/mutations.rs"]
mod mutations;
#[path = "reload/refused.rs"]
mod refused;
#[path = "reload/taken.rs"]
mod taken;
