//! Converts changes and runs of blocks into messages to routers.

use splitrail_kv::{Change, RunNames, SnapshotRun, Tier};
use splitrail_proto::v1;

/// Maximum number of blocks per message. Small in tests, so that there are many messages.
pub(super) const MESSAGE_BLOCKS_MAX: usize = if cfg!(test) { 16 } else { 4096 };

/// Collects changes into messages of a limited size.
#[derive(Debug, Default)]
pub(super) struct ChangeMessages {
    full: Vec<Vec<v1::Change>>,
    open: Vec<v1::Change>,
    /// Blocks in the open message. A change without blocks counts as one.
    open_blocks: usize,
}

impl ChangeMessages {
    /// Adds what an event changed.
    pub(super) fn add(&mut self, change: Change<'_>) {
        match change {
            Change::Stored { parent, blocks, tier } => {
                let mut parent = parent.map(|name| name.0);
                let mut rest = blocks;
                while !rest.is_empty() {
                    let (piece, behind) = rest.split_at(self.free_blocks().min(rest.len()));
                    let stored = v1::Stored {
                        parent,
                        names: piece.iter().map(|block| block.engine.0).collect(),
                        hashes: piece.iter().map(|block| block.hash.0).collect(),
                        tier: proto_tier(tier).into(),
                    };
                    self.add_change(v1::change::Change::Stored(stored), piece.len());
                    (parent, rest) = (piece.last().map(|block| block.engine.0), behind);
                }
            }
            Change::Removed { names, tier } => {
                let mut rest = names;
                while !rest.is_empty() {
                    let (piece, behind) = rest.split_at(self.free_blocks().min(rest.len()));
                    let names = piece.iter().map(|name| name.0).collect();
                    let removed = v1::Removed { names, tier: proto_tier(tier).into() };
                    self.add_change(v1::change::Change::Removed(removed), piece.len());
                    rest = behind;
                }
            }
            Change::Cleared => self.add_change(v1::change::Change::Cleared(v1::Cleared {}), 1),
        }
    }

    /// The number of blocks so far.
    pub(super) fn blocks(&self) -> usize {
        self.full.len() * MESSAGE_BLOCKS_MAX + self.open_blocks
    }

    /// The changes of each message.
    pub(super) fn into_messages(mut self) -> Vec<Vec<v1::Change>> {
        if !self.open.is_empty() {
            self.full.push(self.open);
        }
        self.full
    }

    fn free_blocks(&self) -> usize {
        MESSAGE_BLOCKS_MAX - self.open_blocks
    }

    fn add_change(&mut self, change: v1::change::Change, blocks: usize) {
        self.open.push(v1::Change { change: Some(change) });
        self.open_blocks += blocks;
        if self.open_blocks >= MESSAGE_BLOCKS_MAX {
            self.full.push(std::mem::take(&mut self.open));
            self.open_blocks = 0;
        }
    }
}

fn proto_tier(tier: Tier) -> v1::BlockTier {
    match tier {
        Tier::Device => v1::BlockTier::Device,
        Tier::Host => v1::BlockTier::Host,
        Tier::Disk => v1::BlockTier::Disk,
        Tier::Remote => v1::BlockTier::Remote,
    }
}

/// Converts a run of a snapshot. Uses plain names where possible, which take half the space.
pub(super) fn proto_run(run: SnapshotRun) -> v1::Run {
    let (names, named) = match run.names {
        RunNames::Plain(names) => (names.into_iter().map(|name| name.0).collect(), Vec::new()),
        RunNames::Each(names) => {
            let named = names.into_iter().map(|named| v1::Named {
                at: named.at,
                name: named.engine.0,
                copies: named.copies.to_vec(),
            });
            (Vec::new(), named.collect())
        }
    };
    let parent = run.parent.map(|hash| hash.0);
    v1::Run { parent, hashes: run.hashes.into_iter().map(|hash| hash.0).collect(), names, named }
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitrail_kv::{BlockHash, EngineHash, HashedBlock};

    #[test]
    fn long_changes_are_split_into_messages_that_continue_after_the_last_block() {
        let block = |name| HashedBlock { engine: EngineHash(name), hash: BlockHash(!name) };
        let blocks: Vec<_> = (1..=2 * MESSAGE_BLOCKS_MAX as u64).map(block).collect();
        let mut messages = ChangeMessages::default();
        messages.add(Change::Cleared);
        messages.add(Change::Stored { parent: None, blocks: &blocks, tier: Tier::Host });
        let names: Vec<_> = blocks.iter().map(|block| block.engine).collect();
        messages.add(Change::Removed { names: &names, tier: Tier::Host });
        assert_eq!(messages.blocks(), 1 + 4 * MESSAGE_BLOCKS_MAX);

        let (mut stored, mut removed, mut parents) = (Vec::new(), Vec::new(), Vec::new());
        for changes in messages.into_messages() {
            let mut blocks = 0;
            for change in changes {
                match change.change {
                    Some(v1::change::Change::Stored(piece)) => {
                        assert_eq!(piece.names.len(), piece.hashes.len());
                        assert_eq!(piece.parent, stored.last().copied());
                        blocks += piece.names.len();
                        parents.push(piece.parent);
                        stored.extend(piece.names);
                    }
                    Some(v1::change::Change::Removed(piece)) => {
                        blocks += piece.names.len();
                        removed.extend(piece.names);
                    }
                    _ => blocks += 1,
                }
            }
            assert!(blocks <= MESSAGE_BLOCKS_MAX);
        }
        let names: Vec<_> = names.iter().map(|name| name.0).collect();
        assert_eq!((&stored, &removed), (&names, &names));
        assert_eq!(parents.len(), 3);
    }
}
