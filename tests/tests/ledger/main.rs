//! The ledger is right: the usage in replies, `/metrics`, the ledger file and the engines' own
//! counters agree over thousands of random requests and under faults.
//!
//! The auditor here knows nothing of the router's code: it reads bytes that came over
//! HTTP, files, and the simulated engines' own counters.
#![allow(missing_docs, clippy::unwrap_used)]

mod asking;
mod audit;
mod detail;
mod file;
mod losses;
mod random;
mod scripted;
mod silent;
mod usage;
