//! The shim of one engine.
//!
//! It keeps an exact mirror of the engine's KV blocks, tells every router that it is attached
//! to what changes, counts what runs on the engine whoever sent it, and stands before the
//! engine as a proxy that answers `x-splitrail-gate` at once.

pub mod attach;
mod beat;
pub mod config;
pub mod drain;
pub mod engine;
pub mod mirror;
pub mod plane;
pub mod proxy;
pub mod run;
pub mod status;
mod tasks;
pub mod telemetry;

pub use beat::begin as begin_beats;
