//! Decode first: a decode worker that holds enough of a prompt serves it alone, and
//! nobody ever sees an attempt that was turned away.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "decode_first/gates.rs"]
mod gates;
#[path = "decode_first/guard.rs"]
mod guard;
#[path = "decode_first/logged.rs"]
mod logged;
#[path = "decode_first/only.rs"]
mod only;
#[path = "decode_first/rejected.rs"]
mod rejected;
#[path = "decode_first/support.rs"]
mod support;
#[path = "decode_first/thresholds.rs"]
mod thresholds;
