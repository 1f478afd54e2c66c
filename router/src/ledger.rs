//! What was predicted and what happened: decision records and the token ledger.
//!
//! `leg` and `entry` hold the facts of one prompt as they come in; figures follow from
//! them, and always sum. `close` turns the entries of a request that has ended into
//! metrics and a line of the ledger file. `audit` holds engines against the index.

pub mod audit;
pub mod book;
pub mod close;
pub mod decisions;
pub mod entry;
pub mod file;
pub mod leg;
pub mod record;
pub mod summary;
