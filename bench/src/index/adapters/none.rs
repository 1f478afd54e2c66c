//! No index: what a workload itself holds, to be subtracted from memory figures.

use super::{Adapter, Block};

/// Drops every event.
pub struct Nothing;

impl Adapter for Nothing {
    const NAME: &'static str = "none";
    type Event = ();
    type Query = ();
    type Reader = ();
    type Found = ();
    type Snapshots = ();

    fn new(_workers: u32, _max_blocks: usize) -> Self {
        Self
    }

    fn store_event(_worker: u32, _parent: Option<u64>, _blocks: &[Block]) {}

    fn remove_event(_worker: u32, _engines: &[u64]) {}

    fn query(_blocks: &[Block]) {}

    fn apply(&mut self, (): ()) {}

    fn flush(&mut self) {}

    fn reader(&self) {}

    fn find((): &(), (): &(), (): &mut ()) {}

    fn each_score((): &(), _each: impl FnMut(u32, u32)) {}

    fn score_of((): &(), _worker: u32) -> u32 {
        0
    }

    fn remove_worker(&mut self, _worker: u32) {}

    fn snapshots(&self, _workers: u32) {}

    fn load_snapshots(&mut self, (): ()) -> Option<usize> {
        None
    }
}
