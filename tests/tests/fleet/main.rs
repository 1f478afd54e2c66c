//! Which workers there are, how they are, and what the router believes of their caches.
#![allow(missing_docs, clippy::unwrap_used)]

mod attach;
mod canary_parity;
mod health;
mod kv_events;
