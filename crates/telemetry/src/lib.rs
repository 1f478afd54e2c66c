//! Logs and metrics of the router: the names and labels of metrics, the series that every
//! request updates, and the throttle of repeated log lines.

pub mod clock;
pub mod logging;
pub mod metrics;
mod model_series;
mod series;
mod tenant_series;
mod throttle;

pub use metrics::Metrics;
pub use model_series::{LabelledSeries, ModelSeries};
pub use series::Series;
pub use tenant_series::TenantSeries;
pub use throttle::LogThrottle;
