//! Behaviour of limits, of one router and of replicas.
#![allow(clippy::unwrap_used)]

mod alone;
mod cluster;
mod exactness;
mod shared;
mod sharing;
