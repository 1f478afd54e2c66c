//! The decision trees of the guides, walked with the fault switched on that they end in: each query
//! and each command is taken from the page, and gives what the page says. They run the shipped
//! program and a real Prometheus, and need `curl` and `jq`.
#![cfg(feature = "prometheus")]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "guides/hits.rs"]
mod hits;
#[path = "guides/hits_events.rs"]
mod hits_events;
#[path = "guides/page.rs"]
mod page;
#[path = "observability/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "guides/ttft.rs"]
mod ttft;
#[path = "guides/ttft_workers.rs"]
mod ttft_workers;
#[path = "guides/walk.rs"]
mod walk;
