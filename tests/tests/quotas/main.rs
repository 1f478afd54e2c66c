//! Limits that replicas share over a real broker, which need `nats-server`. The limits count
//! minutes of the clock, so no test that needs the processors for long runs at the same time.
#![cfg(feature = "nats")]
#![allow(missing_docs, clippy::unwrap_used)]

mod broker;
mod routers;
