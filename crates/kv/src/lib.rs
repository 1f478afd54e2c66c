//! The index of KV blocks: which worker holds which part of a prompt. Pure.
//!
//! Prompts and KV events are compared by chained [`BlockHash`]es: the router hashes a prompt
//! ([`Chain`]), the [`Index`] hashes the blocks that workers report ([`Index::apply`]), and
//! [`Index::find`] returns how many blocks of the prompt each worker has. Nothing here reads a
//! clock, opens a socket, logs or draws a random number: the same calls give the same results, in
//! production as in simulation.

mod chain;
mod conversations;
mod event;
mod hash;
mod hot;
mod index;
pub mod prefetch;
mod recent;
mod runs;
mod splitmix;
mod usage;

pub use chain::Chain;
pub use conversations::{ConversationBounds, Conversations, PromptSharing, SharedPrefix};
pub use event::{BlockAdapter, CacheGroup, EngineHash, GroupRule, KvEvent, StoredBlock, Tier};
pub use hash::{
    BlockHash, BlockHasher, HASH_LAYOUT, HashSeed, Namespace, chain_hashes, common_blocks,
    hashes_after,
};
pub use hot::{HotBounds, HotPrefix, HotPrefixes, PrefixTokens};
pub use index::{
    AppliedBlocks, BlockName, Change, FrozenBlocks, HashedBlock, Index, IndexConfig, IndexReader,
    Overlap, Overlaps, Restore, RunNames, SnapshotRun, WorkerKey,
};
pub use recent::{EXPIRED_BLOCKS_MAX, RecentConfig, RecentOverlaps, RecentPrompts};
pub use splitmix::{SplitMix64, mix};
pub use usage::estimate_cached_tokens;
