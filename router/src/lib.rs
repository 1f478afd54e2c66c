//! Splitrail: a front door for LLM clusters with disaggregated prefill and decode.
//!
//! The modules that a request passes come first, in the order in which it passes them. See
//! ARCHITECTURE.md for an overview.

pub mod ingress;

pub mod service;

pub mod admission;

/// The optional parts (cargo features) that this build includes.
pub const PARTS: splitrail_config::Parts = splitrail_config::Parts {
    kubernetes: cfg!(feature = "kubernetes"),
    nats: cfg!(feature = "nats"),
    otlp: cfg!(feature = "otlp"),
};

pub mod abort;
pub mod admin;
pub mod assemble;
pub mod attention;
pub mod core;
pub mod live;
pub mod reload;
pub mod run;
mod runtime_lag;
