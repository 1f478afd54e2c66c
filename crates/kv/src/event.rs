//! KV events: the changes that a worker reports of its cache.
//!
//! The types are those of the index, not of any engine: `splitrail-engine`
//! decodes each engine's wire format into them.

/// A storage tier of a worker's KV cache, fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// Accelerator memory (the engine's own paged cache).
    #[default]
    Device = 0,
    /// Host memory.
    Host = 1,
    /// Local disk.
    Disk = 2,
    /// A store that is reached over the network.
    Remote = 3,
}

impl Tier {
    /// Number of tiers; the length of every per-tier array.
    pub const COUNT: usize = 4;
    /// Every tier, fastest first.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk, Self::Remote];

    /// The name used in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Remote => "remote",
        }
    }
}

/// A block hash as an engine computed it. It identifies a block only for that one worker: two
/// engines, or one engine after a restart, may use other seeds and other algorithms, so it is never
/// compared across workers.
///
/// Engines send unsigned 64-bit integers or 32-byte digests; of a digest, the last eight bytes (big
/// endian) are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// One block within a [`KvEvent::Stored`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The engine's name for the block.
    pub hash: EngineHash,
    /// The block's token ids; exactly one block size of them.
    pub tokens: Vec<u32>,
    /// Whether the block's content depends on more than tokens, adapter and salt (an image, for
    /// example). Such a block and everything after it is recorded for the worker but never matches
    /// a prompt.
    pub opaque: bool,
}

/// The adapter that blocks belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockAdapter {
    /// The adapter's (LoRA) name, which is part of the namespace.
    pub name: String,
    /// The engine's number of the load, which is greater for each later one; 0 if the engine has none.
    pub load: u64,
}

/// What a cache group needs to hold so that a prompt can be resumed at a depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupRule {
    /// All blocks from the prompt's start (full attention).
    Prefix,
    /// The blocks of the last `tokens - 1` tokens before the depth (sliding window).
    Window {
        /// The window, which includes the token that is computed.
        tokens: u32,
    },
    /// The blocks from the last multiple of `tokens` before the depth (chunked local attention): at a
    /// multiple itself, none.
    Chunk {
        /// The chunk's size.
        tokens: u32,
    },
    /// The block that ends at the depth (the state of recurrent layers).
    State,
}

/// A cache group other than the one whose blocks are the spine of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheGroup {
    /// The engine's number of the group.
    pub number: u32,
    /// What the group needs to hold.
    pub rule: GroupRule,
    /// Tokens per block of the group.
    pub block_size: u32,
}

/// A change of one worker's KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Consecutive full blocks became resident. A block that is stored again under a hash which the
    /// worker already holds counts as one more physical copy.
    Stored {
        /// The block before the first of `blocks`, or `None` at a prompt's start.
        parent: Option<EngineHash>,
        /// The blocks, in prompt order.
        blocks: Vec<StoredBlock>,
        /// The adapter that the blocks belong to.
        adapter: Option<BlockAdapter>,
        /// The cache salt. Engines name it only on a prompt's first block, so it is used if
        /// `parent` is `None` and otherwise inherited.
        salt: Option<String>,
        /// Where the blocks are.
        tier: Tier,
    },
    /// One physical copy of each named block was removed from a tier.
    Removed {
        /// The blocks' names.
        hashes: Vec<EngineHash>,
        /// Where they were.
        tier: Tier,
    },
    /// Blocks of a cache group other than the spine became resident in the fastest tier. The spine's
    /// blocks of the same tokens, which have the same names, must have been stored before.
    GroupStored {
        /// The group.
        group: CacheGroup,
        /// The block before the event's tokens, or `None` at a prompt's start.
        parent: Option<EngineHash>,
        /// The number of the event's tokens, of which some may be in none of the blocks.
        tokens: u32,
        /// The names of the blocks, in prompt order. Blocks in between may be missing.
        hashes: Vec<EngineHash>,
    },
    /// One copy of each named block was removed from a cache group other than the spine.
    GroupRemoved {
        /// The engine's number of the group.
        group: u32,
        /// The blocks' names.
        hashes: Vec<EngineHash>,
    },
    /// All copies of each named block were dropped, in every tier.
    Dropped {
        /// The blocks' names.
        hashes: Vec<EngineHash>,
    },
    /// The worker dropped all its blocks in one tier.
    TierCleared {
        /// Where the blocks were.
        tier: Tier,
    },
    /// The worker dropped all its blocks, in every tier.
    Cleared,
}

impl KvEvent {
    /// Whether all blocks in the fastest tier are gone.
    pub fn clears_device(&self) -> bool {
        matches!(self, Self::TierCleared { tier: Tier::Device } | Self::Cleared)
    }
}
