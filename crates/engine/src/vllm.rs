//! The dialect of vLLM. Other engines use parts of it, in particular its KV event stream.

pub mod events;
pub mod hand_off_trial;
pub mod identity;
pub mod load;
mod sequence;
pub mod subscription;
pub mod tokenize;
