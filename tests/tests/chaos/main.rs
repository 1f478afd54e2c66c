//! A cluster of processes under load in which processes are killed, paused and replaced. In any case
//! no reply is wrong, no request hangs, and after a time the index of every router is right again.
//!
//! `SPLITRAIL_CHAOS_ROUNDS` is the number of rounds of kills, `SPLITRAIL_CHAOS_BROKER_ROUNDS` that of
//! kills of the broker, and `SPLITRAIL_CHAOS_SEED` repeats a run; the seed is printed.
#![allow(missing_docs, clippy::unwrap_used)]

use tokio::sync::Mutex;

/// One fleet of a dozen processes at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

#[cfg(feature = "nats")]
mod broker;
mod kills;
mod partition;
mod rolling;
