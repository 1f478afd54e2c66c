//! The router's configuration: what is accepted, what is refused, and with which words.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../fixtures/config/support.rs"]
mod support;

mod access;
mod discovery;
mod documents;
mod engine_tls;
mod fleet;
mod jwt;
mod listener_tls;
mod mutations;
mod peer_fetch;
mod prewarm;
mod problems;
mod quotas;
mod rules;
mod tracing;
mod yaml;
