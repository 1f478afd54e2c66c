//! Where a request goes: pure functions of a snapshot.
//!
//! No clock, no I/O and no randomness inside: turns, draws and times are arguments, so that a
//! recorded decision can be repeated, and the router and a simulated cluster decide by the
//! same code.

mod candidate;
mod choose;
mod coefficients;
mod policy;

pub mod auto;

pub use auto::AutoCosts;
pub use candidate::{Candidate, Leg, Query};
pub use choose::{Choice, holders, mix, pick};
pub use coefficients::{Coefficients, nanoseconds};
pub use policy::Policy;
