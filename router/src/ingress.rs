//! The listeners for clients: read requests within bounds and write replies.

pub mod certificate;
mod checked_socket;
mod client_stream;
mod connection;
mod connection_activity;
pub mod connection_service;
mod cross_origin;
pub mod framing;
pub mod grpc;
pub(crate) mod head;
pub mod http;
pub mod identify;
pub mod listener;
mod models;
mod near_path;
mod pace;
mod rate_limits;
mod recorded_socket;
pub mod reply;
pub(crate) mod request_body;
mod streams;
pub mod tls_listener;
mod unread_rest;
mod wire;
