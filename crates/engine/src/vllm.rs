//! The dialect of vLLM, which other engines speak too (its KV event stream in
//! particular).

pub mod events;
pub mod identity;
pub mod load;
mod sequence;
pub mod subscription;
