//! A plan of legs and its execution: what is sent to which engine, in which
//! order, what is tried again, and what ends with the client.

pub mod client;
pub mod legs;
pub mod plan;
pub mod run;
