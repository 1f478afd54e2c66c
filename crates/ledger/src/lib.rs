//! What was predicted and what happened: decision records and the token ledger.
//!
//! `leg` and `entry` hold the facts of one prompt as they come in; figures follow from
//! them, and always sum. `close` turns the entries of a request that has ended into
//! metrics and a line of the ledger file; `recorder` writes decisions down for replay.

pub mod books;
pub mod close;
pub mod decisions;
pub mod entry;
pub mod file;
pub mod leg;
pub mod lines;
pub mod record;
pub mod recorder;
pub mod stages;
pub mod summary;
pub mod veto;
