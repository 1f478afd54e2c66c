//! Routers and shims over a broker (NATS): the same index as over streams, whatever happens to the
//! broker. These tests need `nats-server`.

mod forged;
mod hostile;
mod picture;
mod recovery;
mod support;
