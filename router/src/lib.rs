//! The router.
pub mod config;
