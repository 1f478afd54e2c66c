//! Engines that fail: a failure before the first byte is retried on another worker, a failure after it
//! is reported to the client, and nothing stays booked in either case.
//!
//! Every test ends with `Trial::finish`, which checks that nothing is booked or in
//! flight, that each request is counted once with its outcome, and that no hand-off
//! was sent twice.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "faults/aggregated.rs"]
mod aggregated;
#[path = "faults/batch.rs"]
mod batch;
#[path = "faults/decode.rs"]
mod decode;
#[path = "faults/mid_stream.rs"]
mod mid_stream;
#[path = "faults/nonsense.rs"]
mod nonsense;
#[path = "faults/prefill.rs"]
mod prefill;
#[path = "faults/unreachable.rs"]
mod unreachable;
