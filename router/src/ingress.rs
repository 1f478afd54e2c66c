//! The listeners for clients: read requests within bounds and write replies.

mod addresses;
mod checked_socket;
mod connection;
mod connection_activity;
pub mod connection_service;
pub mod context;
pub mod framing;
pub mod grpc;
mod head;
pub mod http;
pub mod identify;
pub mod listener;
mod pace;
mod rate_limits;
pub mod reply;
mod request_body;
mod streams;
mod wire;
