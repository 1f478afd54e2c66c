//! Logs and metrics.

pub mod logging;
pub mod metrics;
pub mod model;
pub mod series;
