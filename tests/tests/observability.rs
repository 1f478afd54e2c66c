//! The dashboard, the rules and the alerts of `deploy/observability`, against the table of metrics
//! and against a real Prometheus. The suites that start Prometheus need the feature `prometheus`.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "observability/files.rs"]
mod files;
#[path = "observability/promql.rs"]
mod promql;
#[path = "observability/vocabulary.rs"]
mod vocabulary;

#[cfg(feature = "prometheus")]
#[path = "observability/alert_cases.rs"]
mod alert_cases;
#[cfg(feature = "prometheus")]
#[path = "observability/live.rs"]
mod live;
#[cfg(feature = "prometheus")]
#[path = "observability/promtool.rs"]
mod promtool;
#[cfg(feature = "prometheus")]
#[path = "observability/provoked.rs"]
mod provoked;
#[cfg(feature = "prometheus")]
#[path = "observability/server.rs"]
mod server;
