//! Plans the legs of a request and runs them: which engine gets which leg, in which order, what is
//! retried, and what is cancelled when the client leaves.

mod account;
mod attempts;
mod auxiliary;
pub mod boxed;
pub mod context;
mod decode_try;
pub mod explain;
mod first;
pub mod gate;
pub mod generate;
pub mod hand_off;
mod kv_read;
pub mod lease;
pub mod legs;
pub mod migrate;
mod pair;
mod peer_fetch;
mod place;
pub mod plan;
mod prefill;
pub mod prepare;
pub mod prewarm;
mod push;
mod read_back;
pub mod relay;
mod repair;
pub mod reply;
mod reply_leg;
pub mod run;
pub mod staged;
mod supporting_workers;
mod threshold_reply;
pub mod weigh;
