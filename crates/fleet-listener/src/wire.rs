//! Converts reports of blocks from the protocol's types to those of the index. The input is
//! untrusted.

use splitrail_kv::{BlockHash, BlockName, EngineHash, HashedBlock, RunNames, SnapshotRun, Tier};
use splitrail_proto::v1;

/// Maximum number of blocks in one run of a snapshot. A shim's index splits longer runs.
const RUN_BLOCKS_MAX: usize = 1024;

/// Why a message is invalid, for logs.
pub(super) type InvalidReason = &'static str;

/// Converts a run of a snapshot.
///
/// # Errors
/// The run is empty or too long, or the number of names does not fit the number of blocks.
pub(super) fn run(run: v1::Run) -> Result<SnapshotRun, InvalidReason> {
    if run.hashes.is_empty() || run.hashes.len() > RUN_BLOCKS_MAX {
        return Err("a run is empty or too long");
    }
    let names = match (run.names.is_empty(), run.named.is_empty()) {
        (_, true) if run.names.is_empty() || run.names.len() == run.hashes.len() => {
            RunNames::Plain(run.names.into_iter().map(EngineHash).collect())
        }
        (true, false) if run.named.len() <= 2 * RUN_BLOCKS_MAX => {
            RunNames::Each(run.named.into_iter().map(named).collect::<Result<_, _>>()?)
        }
        _ => return Err("a run's names do not fit its blocks"),
    };
    let hashes = run.hashes.into_iter().map(BlockHash).collect();
    Ok(SnapshotRun { parent: run.parent.map(BlockHash), hashes, names })
}

fn named(named: v1::Named) -> Result<BlockName, InvalidReason> {
    if named.copies.len() > Tier::COUNT {
        return Err("a block has copies in more tiers than there are");
    }
    let mut copies = [0; Tier::COUNT];
    copies[..named.copies.len()].copy_from_slice(&named.copies);
    Ok(BlockName { at: named.at, engine: EngineHash(named.name), copies })
}

/// Converts blocks that an engine stored.
///
/// # Errors
/// There are more names than hashes, or fewer.
pub(super) fn stored(stored: &v1::Stored) -> Result<Vec<HashedBlock>, InvalidReason> {
    if stored.names.len() != stored.hashes.len() {
        return Err("stored blocks have more names than hashes, or fewer");
    }
    let block = |(name, hash): (&u64, &u64)| HashedBlock {
        engine: EngineHash(*name),
        hash: BlockHash(*hash),
    };
    Ok(stored.names.iter().zip(&stored.hashes).map(block).collect())
}

/// Converts a tier.
///
/// # Errors
/// The number stands for no tier.
pub(super) fn tier(tier: i32) -> Result<Tier, InvalidReason> {
    match v1::BlockTier::try_from(tier) {
        Ok(v1::BlockTier::Device) => Ok(Tier::Device),
        Ok(v1::BlockTier::Host) => Ok(Tier::Host),
        Ok(v1::BlockTier::Disk) => Ok(Tier::Disk),
        Ok(v1::BlockTier::Remote) => Ok(Tier::Remote),
        Err(_) => Err("unknown tier"),
    }
}
