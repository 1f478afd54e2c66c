//! The shim: a process that runs beside one engine.
//!
//! The shim keeps an exact mirror of the KV blocks that the engine holds and reports the changes
//! to every router that it is attached to. It is also a reverse proxy in front of the engine,
//! which counts the requests of all routers and answers requests with the header
//! `x-splitrail-gate` at once if the engine does not hold the required blocks.

pub mod attach;
pub mod config;
pub mod drain;
pub mod engine;
pub mod mirror;
pub mod proxy;
pub mod run;
pub mod status;
mod tasks;
pub mod telemetry;
mod ticks;

pub use ticks::start as start_ticks;
