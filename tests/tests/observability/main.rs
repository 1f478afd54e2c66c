//! The outputs for operators: metrics, dashboards, alerts and guides, access log and traces. The
//! suites that start a real Prometheus need the feature `prometheus`.
#![allow(missing_docs, clippy::unwrap_used)]

mod access_log;
mod counts;
mod current_gauges;
mod files;
mod metrics;
mod metrics_listener;
mod outcomes;
mod promql;
#[cfg(feature = "otlp")]
mod traces;
mod vocabulary;

#[cfg(feature = "prometheus")]
mod alert_cases;
#[cfg(feature = "prometheus")]
mod compose;
#[cfg(feature = "prometheus")]
mod guides;
#[cfg(all(feature = "prometheus", feature = "otlp"))]
mod hostile_names;
#[cfg(all(feature = "prometheus", feature = "nats"))]
mod live;
#[cfg(feature = "prometheus")]
mod promtool;
#[cfg(feature = "prometheus")]
mod provoked;
#[cfg(feature = "prometheus")]
mod runbook;
#[cfg(feature = "prometheus")]
mod server;
