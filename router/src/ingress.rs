//! The doors: bytes in, bounded; replies out.

mod arriving;
mod connection;
pub mod context;
pub mod door;
pub mod framing;
pub mod grpc;
mod guarded;
pub mod http;
pub mod listener;
mod pulse;
pub mod reply;
mod streams;
mod wire;
