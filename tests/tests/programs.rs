//! The two programs as their users run them: commands that need no cluster, arguments from the
//! environment, colours, and the notation of configuration files.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "programs/about.rs"]
mod about;
#[path = "programs/arguments.rs"]
mod arguments;
#[path = "programs/health.rs"]
mod health;
#[path = "programs/init.rs"]
mod init;
#[path = "programs/notation.rs"]
mod notation;
#[path = "programs/support.rs"]
mod support;
