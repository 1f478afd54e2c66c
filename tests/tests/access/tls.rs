//! TLS on the listeners for clients and operators.

mod certificates;
mod clients;
mod handshakes;
mod memory;
mod readers;
mod serving;
pub(crate) mod support;
