//! How KV moves between engines.
//!
//! A connector that hands KV over after the prefill leg is in [`staged`]; one whose legs are sent at
//! once is a module of [`pair`]. What the bodies of both legs say of each other is in [`params`], and
//! the bodies are made in [`bodies`]. A hand-off has a [`lease`]; what an engine keeps for legs that
//! were given up is freed by [`staged`] and [`repair`]. [`peer_fetch`] moves a prefix to a worker
//! that lacks it, for a request or for [`prewarm`]; [`pinned`] is what decode engines keep for
//! read-back.

pub mod bodies;
pub mod lease;
pub mod pair;
pub mod params;
pub mod participants;
pub mod peer_fetch;
pub mod pinned;
pub mod prewarm;
pub mod repair;
pub mod staged;
pub mod trial;
