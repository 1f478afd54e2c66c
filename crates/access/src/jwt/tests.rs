//! Which tokens are accepted, and where their keys come from.

mod algorithms;
mod claims;
mod file;
mod form;
mod rotation;
mod server;
mod support;
mod url;
