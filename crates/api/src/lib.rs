//! The HTTP APIs that clients use. Only what routing needs is parsed; all other bytes of a body are
//! passed on unchanged.

mod auxiliary;
pub mod bounds;
mod endpoint;
pub mod error;
pub mod form;
pub mod json;
mod list;
pub mod memory_budget;
pub mod name;
mod parts;
mod plain;
pub mod request;
mod responses;
pub mod sampling;
pub mod sanitise;
pub mod session;
pub mod shares;
pub mod steering;
pub mod text;
pub mod unread;
pub mod usage;
pub mod via;

pub use endpoint::Endpoint;
pub use json::JsonObject;
pub use parts::Parts;
pub use request::Inbound;
