//! The atomics that readers and the writer share; a model checker's under `--cfg loom`,
//! and in unit tests some that tell of every access ([`super::probe`]).

#[cfg(all(test, not(loom)))]
pub(super) use super::probe::{AtomicU32, AtomicU64};
#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(any(test, loom)))]
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{Ordering, fence};
