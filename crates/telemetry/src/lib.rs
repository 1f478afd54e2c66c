//! Logs and metrics of the router: what each metric is called, its labels, the series that every
//! request touches, and the throttle of log lines that would repeat.

pub mod clock;
pub mod logging;
pub mod metrics;
mod model_series;
mod series;
mod throttle;

pub use metrics::Metrics;
pub use model_series::ModelSeries;
pub use series::Series;
pub use throttle::LogThrottle;
