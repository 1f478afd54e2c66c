//! The APIs that clients speak: what routing needs is parsed, everything else stays as
//! the client's bytes.

pub mod bounds;
pub mod json;
pub mod request;
mod responses;
pub mod sampling;
pub mod sanitise;
mod scan;
pub mod steering;
pub mod strict;

pub use json::JsonObject;
pub use request::{Endpoint, Inbound};
