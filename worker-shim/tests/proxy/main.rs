//! Tests of the reverse proxy in front of simulated engines, and of servers that write arbitrary
//! bytes.
#![allow(clippy::unwrap_used)]

mod body_framing;
mod counts;
mod engine_connections;
mod forwarding;
mod gate;
mod hosts;
mod limits;
mod paths;
mod random_failures;
mod support;
