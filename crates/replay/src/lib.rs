//! What if: a trace through the decisions that serve traffic, over a cluster in virtual time.
//!
//! The cluster is [`splitrail_sim::cluster`]; the decisions are [`splitrail_policy`]'s. This
//! crate reads traces, tells the one what it would know of the other, and reports. It has no
//! policy of its own but references that no router could follow, which know the queue's
//! future ([`oracle`]) or share one cache between all workers.

pub mod auto;
pub mod compare;
pub mod driver;
pub mod entry;
pub mod feed;
pub mod held;
pub mod loss;
pub mod named;
pub mod oracle;
pub mod preset;
pub mod report;
pub mod scenario;
pub mod svg;
pub mod table;
pub mod trace;

pub use entry::{Entry, sweep};
pub use named::{Kind, Named};
pub use preset::Model;
pub use report::Report;
pub use scenario::{Scenario, coefficients};
