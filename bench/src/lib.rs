//! Comparison benchmarks. Each program in `src/bin` calls the `main` of one module.

pub mod fleet;
pub mod frontdoor;
pub mod index;
mod options;
pub mod replay;
mod splitmix;
