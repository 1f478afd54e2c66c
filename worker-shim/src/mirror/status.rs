//! How a mirror stands.

use splitrail_kv::Tier;

/// A mirror, for metrics and status pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Its identity; empty before a router has said how blocks are hashed.
    pub mirror_id: String,
    /// The number of its last change.
    pub sequence: u64,
    /// Changes that are kept for routers that come back.
    pub ring_changes: usize,
    /// Their bytes, about.
    pub ring_bytes: usize,
    /// Bytes of memory that the index takes.
    pub index_bytes: usize,
    /// Copies of everything that were made for routers.
    pub snapshots: u64,
    /// Each rank.
    pub ranks: Vec<RankStatus>,
}

/// One rank of a mirror.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStatus {
    /// The rank.
    pub rank: u16,
    /// Distinct blocks, per tier (indexed by `Tier as usize`).
    pub blocks: [usize; Tier::COUNT],
    /// Whether the engine's events reach the mirror, without a gap.
    pub current: bool,
    /// Whether blocks are missing that were beyond the bound.
    pub truncated: bool,
    /// How often it began anew, and why the last time.
    pub resets: u64,
    /// Why it last began anew: a name for metrics.
    pub last_reset: Option<&'static str>,
    /// Gaps in the engine's events, whether or not a replay filled them.
    pub gaps: u64,
    /// Messages that made no sense, and blocks that could not be indexed.
    pub rejected: u64,
}
