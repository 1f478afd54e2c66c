//! What is reported to operators of each request of a client: its id, its client's address and its
//! trace context (`identity`), what is known when the request has ended (`summary`), its line in the
//! access log, and its spans.
//!
//! No request waits for a log or a collector.

pub mod access_log;
pub mod identity;
pub mod summary;
pub mod traces;
