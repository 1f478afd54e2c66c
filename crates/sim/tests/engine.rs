//! The simulated engine from its clients' point of view.
#![allow(clippy::unwrap_used)]

#[path = "engine/abort.rs"]
mod abort;
#[path = "engine/connectors.rs"]
mod connectors;
#[path = "engine/events.rs"]
mod events;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/generate.rs"]
mod generate;
#[path = "engine/hand_off.rs"]
mod hand_off;
#[path = "engine/http_api.rs"]
mod http_api;
#[path = "engine/msgpack.rs"]
mod msgpack;
#[path = "engine/one_shot.rs"]
mod one_shot;
#[path = "engine/push.rs"]
mod push;
#[path = "engine/read_back.rs"]
mod read_back;
#[path = "engine/support.rs"]
mod support;
#[path = "engine/threshold.rs"]
mod threshold;
