//! Tests of the shim as a process, between a simulated engine and a router that checks every
//! message.
#![allow(clippy::unwrap_used)]

mod drain;
mod drain_under_load;
mod exit_codes;
#[path = "../support/fake_router.rs"]
mod fake_router;
mod lifecycle;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../tests/src/ports.rs"]
mod ports;
mod support;
