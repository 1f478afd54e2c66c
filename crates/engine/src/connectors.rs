//! What engines say to each other, and the router to them, so that KV moves: one module for each
//! connector.

pub mod hand_off_trial;
pub mod mooncake;
pub mod nixl;
pub mod nixl_push;
pub mod sglang_room;
