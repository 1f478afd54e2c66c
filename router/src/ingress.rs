//! The doors: bytes in, bounded; replies out.

pub mod context;
pub mod grpc;
mod grpc_body;
pub mod http;
pub mod listener;
pub mod reply;
