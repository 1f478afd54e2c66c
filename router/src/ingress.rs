//! The listeners for clients: read requests within bounds and write replies.

mod connection;
pub mod connection_service;
mod cross_origin;
pub mod grpc;
pub(crate) mod head;
pub mod http;
pub mod identify;
pub mod listener;
mod models;
mod near_path;
mod openapi;
mod own_paths;
mod rate_limits;
pub mod reply;
pub(crate) mod request_body;
mod streams;
pub mod tls_listener;
