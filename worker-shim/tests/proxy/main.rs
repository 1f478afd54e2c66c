//! The reverse proxy, before simulated engines and before servers that write any bytes.
#![allow(clippy::unwrap_used)]

mod bounds;
mod counts;
mod gate;
mod lines;
mod paths;
mod pieces;
mod random;
mod support;
mod transparent;
