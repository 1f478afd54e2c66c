//! Limits that three router processes share over a real broker. These tests need `nats-server`.
#![cfg(feature = "nats")]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "quotas_routers/admissions.rs"]
mod admissions;
#[path = "quotas_routers/flood.rs"]
mod flood;
#[path = "quotas_routers/support.rs"]
mod support;

// The order of the tests is that of their modules: those that wait for a minute begin first.
#[path = "quotas_routers/changed_limits.rs"]
mod changed_limits;
#[path = "quotas_routers/killed_router.rs"]
mod killed_router;
#[path = "quotas_routers/lost_broker.rs"]
mod lost_broker;
#[path = "quotas_routers/settlement.rs"]
mod settlement;
#[path = "quotas_routers/stopped_router.rs"]
mod stopped_router;
