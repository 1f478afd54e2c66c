//! Behaviour of limits, of one router and of replicas.
#![allow(clippy::unwrap_used)]

mod alone;
mod cluster;
mod shared;
mod sharing;
