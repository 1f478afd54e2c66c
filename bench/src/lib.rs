//! Comparison benchmarks. Each program is a thin binary over one module.

pub mod fleet;
pub mod frontdoor;
pub mod index;
pub mod replay;
