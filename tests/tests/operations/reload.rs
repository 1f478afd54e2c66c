//! Reloading the configuration while the router serves.

mod support;

mod load;
mod mutations;
mod refused;
mod taken;
