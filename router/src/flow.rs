//! A plan of legs and its execution: what is sent to which engine, in which
//! order, what is tried again, and what ends with the client.

pub mod answer;
pub mod client;
pub mod context;
pub mod hand_off;
pub mod legs;
mod place;
pub mod plan;
mod prefill;
pub mod run;
