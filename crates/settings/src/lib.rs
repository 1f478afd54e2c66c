//! What the router and the shim both do before they serve: read and check a configuration file,
//! resolve secrets, and start logging.
//!
//! A file becomes a tree in which every value has its place ([`tree`]). The tree is compared with
//! the JSON Schema of a program's typed configuration and with the program's own rules; both report
//! everything they find. Only a tree without mistakes becomes a value ([`file::parse`]). The
//! differences between the programs are in their [`Dialect`].

mod check;
pub mod endpoint;
pub mod file;
pub mod logging;
pub mod problem;
pub mod process;
pub mod reference;
mod renames;
pub mod scalar;
mod schema;
pub mod secret;
pub mod tree;
pub mod words;

pub use problem::{Problem, Problems};
pub use secret::{ResolvedSecret, Secret, SecretError};
pub use words::Dialect;
