//! Consecutive blocks of one prompt from two kinds of source: an event, with a name and a hash for
//! each block, or a snapshot, with names and hashes in separate lists.

use super::HashedBlock;
use super::forest::{Cursor, Forest, Span};
use crate::event::EngineHash;
use crate::hash::BlockHash;

/// Blocks with their names and hashes.
pub(super) trait BlockSequence: Copy {
    fn len(self) -> usize;

    /// The names of the blocks from `from` on.
    fn names(self, from: usize) -> impl Iterator<Item = u64>;

    /// The blocks from `from` to `to`.
    fn part(self, from: usize, to: usize) -> Self;

    /// See [`Forest::follow`].
    fn follow(self, forest: &mut Forest, cursor: Cursor) -> Option<Span>;

    /// See [`Forest::extend`].
    fn extend(
        self,
        forest: &mut Forest,
        cursor: Cursor,
        grows: Option<u16>,
    ) -> Option<(Span, bool)>;
}

impl BlockSequence for &[HashedBlock] {
    #[inline]
    fn len(self) -> usize {
        <[_]>::len(self)
    }

    #[inline]
    fn names(self, from: usize) -> impl Iterator<Item = u64> {
        self.get(from..).unwrap_or_default().iter().map(|block| block.engine.0)
    }

    fn part(self, from: usize, to: usize) -> Self {
        &self[from..to]
    }

    fn follow(self, forest: &mut Forest, cursor: Cursor) -> Option<Span> {
        forest.follow(cursor, self, |block| block.hash.0)
    }

    fn extend(
        self,
        forest: &mut Forest,
        cursor: Cursor,
        grows: Option<u16>,
    ) -> Option<(Span, bool)> {
        forest.extend(cursor, self, |block| block.hash.0, grows)
    }
}

/// Names and hashes in separate lists of the same length.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedBlocks<'a> {
    pub(super) names: &'a [EngineHash],
    pub(super) hashes: &'a [BlockHash],
}

impl BlockSequence for NamedBlocks<'_> {
    #[inline]
    fn len(self) -> usize {
        self.names.len()
    }

    #[inline]
    fn names(self, from: usize) -> impl Iterator<Item = u64> {
        self.names.get(from..).unwrap_or_default().iter().map(|name| name.0)
    }

    fn part(self, from: usize, to: usize) -> Self {
        Self { names: &self.names[from..to], hashes: &self.hashes[from..to] }
    }

    fn follow(self, forest: &mut Forest, cursor: Cursor) -> Option<Span> {
        forest.follow(cursor, self.hashes, |hash| hash.0)
    }

    fn extend(
        self,
        forest: &mut Forest,
        cursor: Cursor,
        grows: Option<u16>,
    ) -> Option<(Span, bool)> {
        forest.extend(cursor, self.hashes, |hash| hash.0, grows)
    }
}
