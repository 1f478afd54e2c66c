//! Engines that fail: a failure before the first byte is retried on another worker, a failure after it
//! is reported to the client, and nothing stays booked in either case.
//!
//! Most tests end with `Trial::finish`, which checks that nothing is booked or in
//! flight, that each request is counted once with its outcome, and that no hand-off
//! was sent twice.
#![allow(missing_docs, clippy::unwrap_used)]

mod aggregated;
mod batch;
mod breakers;
mod decode;
mod ends;
mod evidence;
mod hung;
mod mid_stream;
mod nonsense;
mod prefill;
mod processes;
mod silence;
mod unreachable;
