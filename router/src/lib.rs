//! Splitrail: a front door for LLM clusters with disaggregated prefill and decode.
//!
//! The modules stand in the order in which a request passes them; what is beside
//! the way comes after. See ARCHITECTURE.md for the map.

pub mod ingress;

pub mod service;

pub mod admission;

pub mod reload;

pub mod admin;
pub mod assemble;
pub mod core;
pub mod cut;
pub mod run;
