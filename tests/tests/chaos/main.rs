//! A cluster of processes under load in which processes are killed, paused and replaced. In any case
//! no reply is wrong, no request hangs, and after a time the index of every router is right again.
//!
//! `SPLITRAIL_CHAOS_ROUNDS` is the number of rounds of kills, and `SPLITRAIL_CHAOS_SEED` repeats a run;
//! the seed is printed.
#![allow(missing_docs, clippy::unwrap_used)]

use tokio::sync::Mutex;

/// One fleet of a dozen processes at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

mod kills;
mod partition;
mod rolling;
