//! A fleet of processes under load in which things are killed, cut off and exchanged. Whatever
//! happens: no wrong answer, no hang, and after a while every router's picture is true again.
//!
//! `SPLITRAIL_CHAOS_ROUNDS` says how often something is killed, `SPLITRAIL_CHAOS_SEED` repeats a
//! run; the seed is printed.
#![allow(missing_docs, clippy::unwrap_used)]

use tokio::sync::Mutex;

/// One fleet of a dozen processes at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

#[cfg(feature = "nats")]
mod broker;
mod kills;
mod partition;
mod rolling;
