//! Runs a trace through the router's decisions, on a cluster in virtual time.
//!
//! The cluster is [`splitrail_sim::cluster`]; the decisions are those of [`splitrail_policy`]. This
//! crate reads traces, gives the policies what they would know of the cluster, and reports. Its own
//! policies are rules that others have published ([`published`]), and references that no router could
//! implement, because they know the queues' future ([`oracle`]) or share one cache between all
//! workers.

pub mod auto;
pub mod compare;
pub mod driver;
pub mod entry;
pub mod feed;
pub mod fetches;
pub mod held;
pub mod loss;
pub mod named;
pub mod oracle;
pub mod placement;
pub mod preset;
pub mod published;
pub mod report;
pub mod scenario;
pub mod svg;
pub mod table;
pub mod trace;

pub use entry::{Entry, sweep};
pub use fetches::FetchBounds;
pub use named::{NamedPolicy, ReplayPolicy};
pub use preset::Model;
pub use published::PublishedPolicy;
pub use report::PolicyReport;
pub use scenario::{Scenario, coefficients, cost_model};
