//! Limits that three router processes share over a real broker. These tests need `nats-server`.

mod admissions;
mod flood;
mod support;

// The order of the tests is that of their modules: those that wait for a minute begin first.
mod changed_limits;
mod killed_router;
mod lost_broker;
mod settlement;
mod stopped_router;
