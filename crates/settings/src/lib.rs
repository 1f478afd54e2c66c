//! What the router and the shim do alike before they serve: read a configuration file
//! and check it whole, fetch secrets, start logging.
//!
//! A file becomes a tree in which every value knows its place ([`tree`]). The tree is held
//! against the JSON Schema of a program's typed configuration and against the
//! program's own rules; both report everything they find. Only a tree without a mistake
//! becomes a value ([`file::parse`]). What differs between programs is their [`Dialect`].

mod check;
pub mod endpoint;
pub mod file;
pub mod logging;
pub mod problem;
pub mod process;
pub mod reference;
pub mod scalar;
mod schema;
pub mod secret;
pub mod tree;
pub mod words;

pub use problem::{Problem, Problems};
pub use secret::{ResolvedSecret, Secret, SecretError};
pub use words::Dialect;
