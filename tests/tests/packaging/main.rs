//! What is shipped, and whether it works: artefacts, chart, Compose files, upgrades.
#![allow(missing_docs, clippy::unwrap_used)]

#[cfg(feature = "packaging")]
mod artefacts;
mod chart;
mod compose;
mod previous_release;
