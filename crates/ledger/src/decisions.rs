//! Decision records: how each prompt was routed, for operators and tests. Counts and hashes only:
//! no prompt, no token ids, no completions.
//!
//! Other crates read a record and report events; only events change a record.

mod handle;
mod legs;
mod notable;
mod parts;
mod placement;
mod record;
mod reply;
mod ring;
#[cfg(test)]
mod tests;

pub use handle::DecisionHandle;
pub use parts::{CandidateRecord, DrawRecord, FetchChoice, FetchRecord, VetoRecord, WeighedRecord};
pub use placement::Placement;
pub use record::Decision;
pub use reply::UsageReport;
pub use ring::{DecisionFilter, Decisions};
