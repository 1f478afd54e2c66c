//! A prefix cache that evicts the least recently used blocks.

/// Stands for no block.
const NONE: u32 = u32::MAX;

/// Blocks in the order of their last use: a doubly linked list in two arrays indexed by block, so
/// that every operation is a few loads and stores.
#[derive(Clone, Debug)]
pub struct Lru {
    /// The next more recent block; [`ABSENT`](Self::ABSENT) if the block is not held.
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    len: usize,
    capacity: usize,
}

impl Lru {
    const ABSENT: u32 = u32::MAX - 1;

    /// An empty cache of `capacity` blocks, whose ids are below `distinct_blocks`.
    pub fn new(distinct_blocks: u32, capacity: usize) -> Self {
        let slots = if capacity == 0 { 0 } else { distinct_blocks as usize };
        Self {
            newer: vec![Self::ABSENT; slots],
            older: vec![NONE; slots],
            newest: NONE,
            oldest: NONE,
            len: 0,
            capacity,
        }
    }

    /// Number of blocks held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maximum number of blocks after an insertion.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether it holds the block.
    pub fn holds(&self, block: u32) -> bool {
        self.newer.get(block as usize).is_some_and(|newer| *newer != Self::ABSENT)
    }

    /// Number of leading blocks that it holds.
    pub fn leading(&self, blocks: &[u32]) -> u32 {
        blocks.iter().take_while(|block| self.holds(**block)).count() as u32
    }

    /// Makes these blocks, which it holds, the most recent ones; the first is the most recent, so
    /// that blocks are evicted before the blocks that precede them in a prompt.
    pub fn touch(&mut self, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            self.unlink(*block);
            self.link(*block);
        }
    }

    /// Inserts the first blocks up to the capacity as the most recent ones, then evicts the oldest
    /// until the capacity is kept. `forgot` is called for each evicted block.
    pub fn insert(&mut self, blocks: &[u32], mut forgot: impl FnMut(u32)) {
        for block in blocks[..blocks.len().min(self.capacity)].iter().rev() {
            if self.holds(*block) {
                self.unlink(*block);
            } else {
                self.len += 1;
            }
            self.link(*block);
        }
        while self.len > self.capacity {
            let block = self.oldest;
            self.unlink(block);
            self.newer[block as usize] = Self::ABSENT;
            self.len -= 1;
            forgot(block);
        }
    }

    /// The blocks in the order in which they would be evicted.
    pub fn oldest_first(&self) -> impl Iterator<Item = u32> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let block = next;
            next = *self.newer.get(block as usize)?;
            Some(block)
        })
    }

    fn unlink(&mut self, block: u32) {
        let (newer, older) = (self.newer[block as usize], self.older[block as usize]);
        match newer {
            NONE => self.newest = older,
            _ => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.newer[older as usize] = newer,
        }
    }

    fn link(&mut self, block: u32) {
        self.newer[block as usize] = NONE;
        self.older[block as usize] = self.newest;
        match self.newest {
            NONE => self.oldest = block,
            newest => self.newer[newest as usize] = block,
        }
        self.newest = block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(cache: &Lru) -> Vec<u32> {
        cache.oldest_first().collect()
    }

    #[test]
    fn leaves_are_evicted_before_their_parents() {
        let mut cache = Lru::new(10, 4);
        cache.insert(&[0, 1, 2], drop);
        assert_eq!(order(&cache), [2, 1, 0]);
        let mut gone = Vec::new();
        cache.insert(&[0, 3, 4], |block| gone.push(block));
        assert_eq!((gone, order(&cache)), (vec![2], vec![1, 4, 3, 0]));
        cache.touch(&[1]);
        assert_eq!(order(&cache), [4, 3, 0, 1]);
        assert_eq!((cache.leading(&[0, 1, 2]), cache.leading(&[2, 0])), (2, 0));
    }

    #[test]
    fn a_prompt_above_the_capacity_keeps_its_start() {
        let mut cache = Lru::new(10, 2);
        cache.insert(&[5, 6, 7, 8], drop);
        assert_eq!(order(&cache), [6, 5]);
        let mut none = Lru::new(10, 0);
        none.insert(&[1, 2], drop);
        assert_eq!((none.len(), none.leading(&[1])), (0, 0));
    }

    proptest! {
        #[test]
        fn the_cache_is_a_list_by_last_use_limited_to_its_capacity(
            capacity in 0usize..7,
            prompts in proptest::collection::vec(proptest::collection::vec(0u32..12, 0..9), 0..40),
        ) {
            let mut cache = Lru::new(12, capacity);
            let mut model: Vec<u32> = Vec::new();
            for mut prompt in prompts {
                prompt.dedup();
                let hits = cache.leading(&prompt) as usize;
                prop_assert_eq!(hits, prompt.iter().take_while(|b| model.contains(b)).count());
                cache.touch(&prompt[..hits]);
                cache.insert(&prompt, drop);
                for part in [&prompt[..hits], &prompt[..prompt.len().min(capacity)]] {
                    for block in part.iter().rev() {
                        model.retain(|held| held != block);
                        model.push(*block);
                    }
                }
                model.drain(..model.len().saturating_sub(capacity));
                prop_assert_eq!(order(&cache), model.clone());
                prop_assert_eq!(cache.len(), model.len());
            }
        }
    }
}
