//! Decides what is sent where: the plan of the legs, the gate, local or remote prefill, the worker of
//! a leg, and further attempts.

pub(crate) mod adapter_holders;
pub(crate) mod attempts;
pub(crate) mod context_length;
pub(crate) mod fetchable;
pub(crate) mod gate;
pub(crate) mod place;
pub mod plan;
pub(crate) mod supporting_workers;
pub(crate) mod threshold;
pub mod weigh;
