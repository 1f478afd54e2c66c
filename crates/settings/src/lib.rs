//! What the router and the shim both do before they serve: read and check a configuration file,
//! resolve secrets, and start logging; how their commands end ([`command`]); and how places are
//! divided among the addresses of clients ([`address_shares`]).
//!
//! A file is parsed into a tree that knows the line and column of every value ([`tree`]). Its values
//! are filled from the environment where they name variables ([`variables`]). The tree is checked
//! against the JSON Schema of a program's typed configuration and against the program's own rules;
//! all mistakes are reported. Only a tree without mistakes is converted to the typed configuration
//! ([`file::parse`]). What differs between the files of the two programs is described by
//! [`FileProfile`].

pub mod address_shares;
mod check;
pub mod command;
pub mod endpoint;
pub mod file;
pub mod log_throttle;
pub mod logging;
pub mod natural_order;
pub mod problem;
pub mod process;
pub mod reference;
mod role;
pub mod scalar;
mod schema;
pub mod secret;
pub mod service_manager;
pub mod size;
pub mod tree;
pub mod variables;
pub mod words;

pub use problem::{Problem, Problems};
pub use role::Role;
pub use secret::{ResolvedSecret, Secret, SecretError};
pub use words::FileProfile;
