//! The state of a mirror, for metrics and status pages.

use splitrail_kv::Tier;

/// The state of a mirror.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MirrorStatus {
    /// The mirror's id; empty before a router has sent its hash settings.
    pub mirror_id: String,
    /// The number of the last change.
    pub sequence: u64,
    /// The number of changes in the ring, which are kept for routers that reconnect.
    pub ring_changes: usize,
    /// The approximate size of the ring in bytes.
    pub ring_bytes: usize,
    /// The memory of the index in bytes, which is measured at most once a second.
    pub index_bytes: usize,
    /// Snapshots that were taken for routers.
    pub snapshots: u64,
    /// The state of each rank.
    pub ranks: Vec<RankStatus>,
}

/// The state of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStatus {
    /// The data-parallel rank.
    pub rank: u16,
    /// Distinct blocks per tier (indexed by `Tier as usize`).
    pub blocks: [usize; Tier::COUNT],
    /// Whether the engine's events reach the mirror without a gap.
    pub current: bool,
    /// Whether blocks beyond the limit are left out.
    pub truncated: bool,
    /// How often the blocks of the rank were discarded and read again.
    pub resets: u64,
    /// The reason of the last reset, as a name for metrics.
    pub last_reset: Option<&'static str>,
    /// Gaps in the engine's events, whether or not a replay filled them.
    pub gaps: u64,
    /// Messages that could not be decoded, and blocks that could not be indexed.
    pub rejected: u64,
}
