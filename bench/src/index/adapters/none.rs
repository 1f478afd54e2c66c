//! No index. Its memory figures are those of the workload itself, which are subtracted from the
//! others.

use super::{Adapter, Block};

/// An adapter that drops every event.
pub struct NoIndex;

impl Adapter for NoIndex {
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
