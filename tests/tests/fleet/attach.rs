//! Shims by script against a real router: who may attach, what becomes of what they tell.

mod admission;
mod blocks;
mod fleet;
mod secured;
mod support;
