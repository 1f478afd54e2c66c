//! Splitrail: a front door for LLM clusters with disaggregated prefill and decode.
//!
//! The modules are listed in the order in which a request passes them; modules beside
//! this way come after them. See ARCHITECTURE.md for the map.

pub mod ingress;

pub mod service;

pub mod admission;

pub mod reload;

pub mod admin;
pub mod assemble;
pub mod core;
pub mod cut;
pub mod run;
