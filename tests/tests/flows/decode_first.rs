//! Decode-first: a decode worker that holds enough of a prompt serves it alone, and a rejected
//! attempt is never visible to the client.

mod gates;
mod guard;
mod logged;
mod only;
mod rejected;
mod support;
mod thresholds;
