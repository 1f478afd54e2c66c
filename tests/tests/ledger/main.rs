//! The ledger is true: what clients were told, what `/metrics` says, what lies in the
//! ledger file and what the engines have counted themselves is the same, over thousands
//! of random requests and whatever fails.
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
mod silent;
mod usage;
