//! The simulated engine from its clients' point of view, and the simulated cluster.
#![allow(clippy::unwrap_used)]

mod abort;
mod cache_groups;
mod cache_properties;
mod cache_recording;
mod cluster;
mod connectors;
mod events;
mod faults;
mod generate;
mod hand_off;
mod http_api;
mod msgpack;
mod one_shot;
mod push;
mod read_back;
mod support;
mod threshold;
