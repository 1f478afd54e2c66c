//! Scripted shims attach to a real router: which may attach, and how their reports are used.

mod admission;
mod blocks;
mod fleet;
mod secured;
mod support;
