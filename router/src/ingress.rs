//! The listeners for clients: reads bounded requests and writes replies.

mod addresses;
mod arriving;
mod connection;
pub mod context;
pub mod door;
pub mod framing;
pub mod grpc;
mod guarded;
mod head;
pub mod http;
pub mod listener;
mod pace;
mod pulse;
pub mod reply;
mod streams;
mod wire;
