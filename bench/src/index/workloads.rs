//! The workloads, in the order in which they run.

mod churn;
mod contended;
mod depth;
mod fleet;
mod from_engine;
mod hashing;
mod memory;
mod mixed;
mod removal;
mod roots;
mod snapshot;
mod trace;

use std::io;

pub use self::memory::child;

use super::run::Run;

/// Runs one workload and adds its rows to the run.
pub type Workload = fn(&mut Run) -> io::Result<()>;

/// All workloads, with their names for `--only`.
pub const WORKLOADS: &[(&str, Workload)] = &[
    ("hashing", hashing::run),
    ("trace", trace::run),
    ("depth", depth::run),
    ("mixed", mixed::run),
    ("contended", contended::run),
    ("remove_worker", removal::run),
    ("memory", memory::run),
    ("churn", churn::run),
    ("roots", roots::run),
    ("snapshot", snapshot::run),
    ("fleet1000", fleet::run),
];
