//! The inputs of the fuzz targets for what engines send, as ordinary tests. fuzz/README.md explains
//! their origin.

#[path = "../../../../fuzz/checks/engine_metrics.rs"]
mod engine_metrics;
#[path = "../../../../fuzz/checks/hand_off.rs"]
mod hand_off;
#[path = "../../../../fuzz/checks/kv_events.rs"]
mod kv_events;
#[path = "../../../../fuzz/checks/replay.rs"]
mod replay;
#[path = "../../../../fuzz/checks/usage.rs"]
mod usage;

#[test]
fn kv_events() {
    replay::replay("kv_events", kv_events::check);
}

#[test]
fn engine_metrics() {
    replay::replay("engine_metrics", engine_metrics::check);
}

#[test]
fn hand_off() {
    replay::replay("hand_off", hand_off::check);
}

#[test]
fn usage() {
    replay::replay("usage", usage::check);
}
