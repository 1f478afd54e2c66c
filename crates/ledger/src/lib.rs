//! Predictions and results: decision records and the token ledger.
//!
//! `leg` and `entry` hold the facts of one prompt as they arrive. All figures are derived from
//! these facts, so they always add up. `close` turns the entries of a finished request into metrics
//! and a line of the ledger file; `recorder` writes decisions for replay.

pub mod audit;
pub mod close;
pub mod decisions;
mod destination;
pub mod entry;
mod file;
pub mod leg;
pub mod lines;
pub mod record;
pub mod recorder;
pub mod summary;
pub mod timeline;
pub mod veto;
