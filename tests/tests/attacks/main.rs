//! Attacks and faults, most of them run against the shipped binary through its sockets.
//!
//! Every test is a case that a hostile or broken client, engine, shim or operator could cause, and
//! asserts its safe result: the status on the wire, the peak of resident memory, what an engine was
//! sent. `README.md` has the cases and their tests; `docs/security.md` says what the router
//! promises, and which tests prove it.
#![allow(missing_docs, clippy::unwrap_used)]

mod admin;
mod admin_bounds;
mod canary;
mod canary_shim;
mod corpus;
mod engines;
mod fields;
mod files;
mod fleet;
mod fleet_silence;
mod framing;
mod grpc;
mod hand_off;
mod http1;
mod http2;
mod http2_frames;
mod json;
mod leaving;
mod loops;
mod memory;
mod oracle;
mod publishers;
mod reloads;
mod security;
mod support;
