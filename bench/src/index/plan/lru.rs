//! Caches of bounded size, for workloads with evictions.

use std::collections::{HashMap, VecDeque};

use super::{Block, Chain, Op};
use crate::splitmix::mix;

/// Which block is evicted when a cache is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evict {
    /// The least recently used block; of one prompt, the last block first, as in engines.
    TailFirst,
    /// A random block, which leaves holes in chains.
    Anywhere,
}

struct Held {
    engine: u64,
    /// With `TailFirst`, the time of the last use; with `Anywhere`, the place in `order`.
    stamp: u64,
}

#[derive(Default)]
struct Cache {
    held: HashMap<u64, Held>,
    /// With `TailFirst`: all uses as (time, block), oldest first. Those of a block that was used
    /// again later are still included.
    uses: VecDeque<(u64, u64)>,
    /// With `Anywhere`: all held blocks.
    order: Vec<u64>,
}

/// The caches of all workers.
pub struct Caches {
    caches: Vec<Cache>,
    capacity: usize,
    evict: Evict,
    clock: u64,
    /// Number of blocks evicted so far.
    pub evicted: u64,
}

impl Caches {
    /// Empty caches of `capacity` blocks each.
    pub fn new(workers: u32, capacity: usize, evict: Evict) -> Self {
        let caches = (0..workers).map(|_| Cache::default()).collect();
        Self { caches, capacity, evict, clock: 0, evicted: 0 }
    }

    /// Number of blocks in all caches.
    pub fn entries(&self) -> usize {
        self.caches.iter().map(|cache| cache.held.len()).sum()
    }

    /// The right result of a lookup: workers with their overlaps in blocks, sorted by worker.
    pub fn scores(&self, chain: &[Block]) -> Vec<(u32, u32)> {
        let score = |(worker, cache): (usize, &Cache)| {
            let held = chain.iter().take_while(|block| cache.held.contains_key(&block.chained));
            (worker as u32, held.count() as u32)
        };
        self.caches.iter().enumerate().map(score).filter(|&(_, blocks)| blocks > 0).collect()
    }

    /// Serves a prompt on a worker: stores each run of missing blocks, and then evicts blocks until
    /// the capacity is kept. Appends the operations to `ops`.
    pub fn serve(&mut self, worker: u32, chains: &[Chain], chain: usize, ops: &mut Vec<Op>) {
        let blocks = &chains[chain];
        let mut from = 0;
        while from < blocks.len() {
            let held =
                |block: &Block| self.caches[worker as usize].held.contains_key(&block.chained);
            if held(&blocks[from]) {
                from += 1;
                continue;
            }
            let to = from + blocks[from..].iter().take_while(|block| !held(block)).count();
            ops.push(Op::Store {
                worker,
                parent: from.checked_sub(1).map(|before| blocks[before].engine),
                chain: chain as u32,
                from: from as u32,
                to: to as u32,
            });
            from = to;
        }
        self.touch(worker, blocks);
        let engines = self.evict(worker);
        if !engines.is_empty() {
            ops.push(Op::Remove { worker, engines });
        }
    }

    /// Marks the blocks as used, the last one first, so that the last block of a prompt is its
    /// least recently used one.
    fn touch(&mut self, worker: u32, blocks: &[Block]) {
        let cache = &mut self.caches[worker as usize];
        for block in blocks.iter().rev() {
            self.clock += 1;
            match self.evict {
                Evict::TailFirst => {
                    let held = Held { engine: block.engine, stamp: self.clock };
                    cache.held.insert(block.chained, held);
                    cache.uses.push_back((self.clock, block.chained));
                }
                Evict::Anywhere => {
                    let stamp = cache.order.len() as u64;
                    let order = &mut cache.order;
                    cache.held.entry(block.chained).or_insert_with(|| {
                        order.push(block.chained);
                        Held { engine: block.engine, stamp }
                    });
                }
            }
        }
    }

    fn evict(&mut self, worker: u32) -> Vec<u64> {
        let mut engines = Vec::new();
        let cache = &mut self.caches[worker as usize];
        while cache.held.len() > self.capacity {
            let gone = match self.evict {
                Evict::TailFirst => cache.evict_oldest(),
                Evict::Anywhere => {
                    self.clock += 1;
                    cache.evict_at(mix(self.clock))
                }
            };
            engines.extend(gone);
        }
        self.evicted += engines.len() as u64;
        engines
    }
}

impl Cache {
    fn evict_oldest(&mut self) -> Option<u64> {
        let (stamp, chained) = self.uses.pop_front()?;
        if self.held.get(&chained).is_none_or(|held| held.stamp != stamp) {
            return None;
        }
        self.held.remove(&chained).map(|held| held.engine)
    }

    fn evict_at(&mut self, draw: u64) -> Option<u64> {
        let at = (draw % self.order.len().max(1) as u64) as usize;
        let chained = self.order.swap_remove(at);
        if let Some(moved) = self.order.get(at)
            && let Some(held) = self.held.get_mut(moved)
        {
            held.stamp = at as u64;
        }
        self.held.remove(&chained).map(|held| held.engine)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::chains_of;
    use super::*;

    #[test]
    fn the_tail_of_the_oldest_prompt_goes_first() {
        let chains = chains_of(&[vec![0, 1, 2], vec![0, 5, 6]], 1, 0);
        let mut caches = Caches::new(1, 4, Evict::TailFirst);
        let mut ops = Vec::new();
        caches.serve(0, &chains, 0, &mut ops);
        caches.serve(0, &chains, 1, &mut ops);
        assert_eq!(
            ops.last().unwrap(),
            &Op::Remove { worker: 0, engines: vec![chains[0][2].engine] }
        );
        assert_eq!(caches.scores(&chains[0]), vec![(0, 2)]);
    }

    #[test]
    fn holes_are_stored_again_under_the_block_before() {
        let chains = chains_of(&[vec![0, 1, 2, 3, 4, 5, 6, 7]], 1, 0);
        let mut caches = Caches::new(1, 6, Evict::Anywhere);
        for _ in 0..50 {
            let mut ops = Vec::new();
            caches.serve(0, &chains, 0, &mut ops);
            let counted = |remove: bool| -> usize {
                let of = |op: &&Op| matches!(op, Op::Remove { .. }) == remove;
                ops.iter().filter(of).map(Op::blocks).sum()
            };
            assert_eq!(caches.entries(), 6);
            assert_eq!(counted(true), 2);
            assert!(counted(false) == 8 || counted(false) == 2);
        }
    }
}
