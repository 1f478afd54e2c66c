//! TLS on the listeners for clients and operators.
#![allow(missing_docs, clippy::unwrap_used)]

mod tls {
    mod certificates;
    mod clients;
    mod handshakes;
    mod memory;
    mod readers;
    mod serving;
    mod support;
}
