//! The plan of a request's legs and its execution: which engine gets what, in which order, what is retried,
//! and what is cancelled with the client.

pub mod answer;
mod attempts;
mod auxiliary;
pub mod boxed;
pub mod context;
mod decode_try;
pub mod explain;
mod first;
pub mod gate;
pub mod hand_off;
pub mod lease;
pub mod legs;
pub mod migrate;
mod pair;
mod place;
pub mod plan;
mod prefill;
pub mod prepare;
pub mod reply;
pub mod run;
pub mod staged;
mod threshold_reply;
pub mod weigh;
