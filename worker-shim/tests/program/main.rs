//! The shim as a process, between a simulated engine and a router that believes nothing.
#![allow(clippy::unwrap_used)]

mod busy;
mod drain;
mod ends;
#[path = "../support/fake_router.rs"]
mod fake_router;
mod life;
mod support;
