//! The doors: bytes in, bounded; replies out.

pub mod context;
pub mod grpc;
pub mod http;
pub mod listener;
