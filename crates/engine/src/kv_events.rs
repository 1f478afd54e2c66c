//! The KV events of vLLM and SGLang, which have one format: how they are decoded, and how a
//! publisher is followed.

mod decode;
mod sequence;
mod subscription;

pub use decode::*;
pub use subscription::*;
