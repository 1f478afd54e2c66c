//! Placement: pure functions of a snapshot that choose where a request goes.
//!
//! There is no clock, no I/O and no randomness inside: turns, random draws and times are arguments, so that a
//! recorded decision can be repeated, and the router and a simulated cluster decide by the
//! same code.

mod candidate;
mod choose;
mod coefficients;
mod index;
mod mix;
mod policy;
mod predicted;

pub mod learn;
pub mod loss;
pub mod published;
pub mod queue;
pub mod threshold;

pub use candidate::{Candidate, Leg, Query};
pub use choose::{Choice, Veto, holders, pick};
pub use coefficients::{Coefficients, nanoseconds};
pub use index::{CandidateIndex, WorkerIndex};
pub use mix::mix;
pub use policy::Policy;
pub use predicted::{Terms, extra_work_price};
pub use published::Published;
