//! Limits that replicas share over a real broker, which need `nats-server`. They are of minutes on the
//! clock: nothing that takes the processors for long runs beside them.
#![cfg(feature = "nats")]
#![allow(missing_docs, clippy::unwrap_used)]

mod broker;
mod routers;
