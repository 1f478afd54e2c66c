//! What is shipped, and whether it works: artefacts, chart, Compose files, systemd units.
#![allow(missing_docs, clippy::unwrap_used)]

#[cfg(feature = "packaging")]
mod artefacts;
mod chart;
mod compose;
#[cfg(feature = "packaging")]
mod guides;
#[cfg(feature = "packaging")]
mod site;
mod systemd;
// The server that the suite of what operators are told starts, too.
#[cfg(feature = "prometheus")]
#[allow(dead_code)]
#[path = "../observability/server.rs"]
mod prometheus;
