//! Routers and shims over a broker (NATS): the same picture as over streams, whatever
//! becomes of the broker. These tests need `nats-server`.

mod hostile;
mod picture;
mod recovery;
mod support;
