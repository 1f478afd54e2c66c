//! Placement: pure functions that choose a worker for a request from a snapshot of the candidates.
//!
//! The functions use no clock, no I/O and no randomness: turns, random draws and times are
//! arguments. Therefore a recorded decision can be repeated, and the router and a simulated cluster
//! decide with the same code.

mod candidate;
mod choose;
mod coefficients;
mod fetch;
mod index;
mod kv_format;
mod link;
mod load;
mod policy;
mod predicted;
mod read_back;

pub mod learn;
pub mod loss;
pub mod queue;
pub mod threshold;

pub use candidate::{Candidate, KvRoom, Leg, Query};
pub use choose::{Choice, Veto, holders, pick};
pub use coefficients::{Coefficients, nanoseconds};
pub use fetch::{FetchPlan, Source};
pub use index::{CandidateIndex, WorkerIndex};
pub use kv_format::{KvFormat, group_tag};
pub use link::{Distance, LinkScales, Location};
pub use load::loads;
pub use policy::Policy;
pub use predicted::{CostTerms, extra_work_price};
pub use read_back::{AvailablePrefix, ReadPlan, read_plan};
pub use splitrail_kv::{PromptSharing, SplitMix64, mix};
