//! Logs, metrics and trace context of the router: the names and labels of metrics, the series that
//! every request updates, and the restart of tasks that panic.

pub mod buckets;
pub mod clock;
mod exemplars;
pub mod figure;
pub mod logging;
pub mod metrics;
mod model_series;
mod open_metrics;
mod process;
mod series;
mod supervision;
mod tenant_series;
pub mod trace_context;
mod worker_series;

pub use exemplars::TraceId;
pub use metrics::Metrics;
pub use model_series::{EndedRequest, LabelledSeries, ModelSeries};
pub use series::Series;
pub use supervision::{TaskName, restart_on_panic};
pub use tenant_series::TenantSeries;
pub use worker_series::WorkerSeries;
