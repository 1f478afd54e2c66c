//! Free blocks in the order in which they will be reused.

/// A doubly linked list of block ids, so that a block that is hit again can leave the middle of the
/// list in constant time.
#[derive(Debug)]
pub(super) struct FreeList {
    /// `links[i]` of block i; the last entry is the anchor that closes the ring.
    links: Vec<Link>,
    len: usize,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

impl FreeList {
    /// Blocks `1..total` are free, lowest first. Block 0 is the engine's null block and is never
    /// used.
    pub(super) fn new(total: u32) -> Self {
        let anchor = Link { before: total, after: total };
        let mut list = Self { links: vec![anchor; total as usize + 1], len: 0 };
        for block in 1..total {
            list.push_back(block);
        }
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_back(&mut self, block: u32) {
        let anchor = self.anchor();
        let last = self.links[anchor as usize].before;
        self.link(last, block, anchor);
    }

    /// Puts blocks at the front; the first of them will be reused first.
    pub(super) fn push_front_all(&mut self, blocks: &[u32]) {
        let mut before = self.anchor();
        for block in blocks {
            let after = self.links[before as usize].after;
            self.link(before, *block, after);
            before = *block;
        }
    }

    pub(super) fn pop_front(&mut self) -> Option<u32> {
        let first = self.links[self.anchor() as usize].after;
        if first == self.anchor() {
            return None;
        }
        self.remove(first);
        Some(first)
    }

    /// Removes a block, which must be in the list.
    pub(super) fn remove(&mut self, block: u32) {
        let Link { before, after } = self.links[block as usize];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        self.len -= 1;
    }

    fn anchor(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn link(&mut self, before: u32, block: u32, after: u32) {
        self.links[block as usize] = Link { before, after };
        self.links[before as usize].after = block;
        self.links[after as usize].before = block;
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_keep_the_order_of_other_entries() {
        let mut list = FreeList::new(5);
        list.remove(2);
        list.push_back(2);
        assert_eq!(list.pop_front(), Some(1));
        list.push_front_all(&[1]);
        let order: Vec<_> = std::iter::from_fn(|| list.pop_front()).collect();
        assert_eq!(order, [1, 3, 4, 2]);
        assert_eq!(list.len(), 0);
    }
}
