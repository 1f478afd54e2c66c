//! Growing and shrinking of a table of names.

use super::super::line::{LINE_SLOTS, Line};
use super::groups::{GROUP_BITS_MAX, GROUPS_MAX};
use super::{BATCH, FULL, Home, Lane, Names, Overflow, TAG_BITS_MIN};
use crate::prefetch::prefetch;

impl Names {
    /// Enlarges the table: doubles it if that is enough and leaves enough tag bits; otherwise
    /// rebuilds it.
    #[cold]
    pub(super) fn enlarge(&mut self, names: usize) {
        let groups = (self.groups.count() + names).min(GROUPS_MAX);
        let doubled = self.table.len() * 2;
        let suits = (self.live + names) * FULL.1 <= doubled * LINE_SLOTS * FULL.0
            && groups < 1 << self.group_bits
            && self.doublings + TAG_BITS_MIN < u32::BITS - self.group_bits;
        if suits {
            self.double();
        } else {
            self.lay_out((self.live + names) * 8 / 3, groups);
        }
    }

    /// Makes room for expected names, if there are none yet.
    pub(in super::super) fn expect(&mut self, names: usize) {
        if self.table.is_empty() && names > 0 {
            // The table is then half full; a group is rarely less than half full.
            self.lay_out(names * 2, (names / 4).min(GROUPS_MAX - 1));
        }
    }

    /// Frees memory for expected names that did not arrive.
    pub(in super::super) fn fit(&mut self) {
        if self.table.len() * LINE_SLOTS > 2 * LINE_SLOTS + self.live * 6 {
            self.lay_out(self.live * 8 / 3, self.groups.count());
        }
    }

    /// Splits each line into two, in one pass: one bit of a slot's tag tells to which of the two it
    /// belongs.
    fn double(&mut self) {
        let lines = std::mem::take(&mut self.table);
        let overflow = std::mem::take(&mut self.overflow);
        self.doublings += 1;
        let upper = u32::BITS - self.doublings;
        self.table = vec![Line::EMPTY; lines.len() * 2];
        for (line, halves) in lines.iter().zip(self.table.as_chunks_mut().0) {
            line.split(upper, halves);
        }
        for (line, slot) in overflow.iter() {
            self.add_slot(line << 1 | slot >> upper & 1, slot);
        }
    }

    /// Whether most of its groups are free.
    #[inline]
    pub(in super::super) fn is_sparse(&self) -> bool {
        self.groups.is_sparse()
    }

    /// Moves the groups in use together and frees the rest; returns a function that maps old lanes
    /// to new ones. Takes time proportional to the groups, of which at least as many were freed
    /// before.
    #[cold]
    pub(in super::super) fn shrink(&mut self) -> impl Fn(Lane) -> Lane + use<> {
        let moved = self.groups.shrink();
        self.lay_out(self.live * 8 / 3, self.groups.count());
        moved
    }

    /// Rebuilds the table with this many slots, for this many groups.
    #[cold]
    fn lay_out(&mut self, slots: usize, groups: usize) {
        let lines = slots.div_ceil(LINE_SLOTS).max(1);
        // Leaves room for as many doublings as leave enough tag bits.
        let needed = (groups + 1).next_power_of_two().ilog2();
        let spare = (u32::BITS - TAG_BITS_MIN).saturating_sub(needed) / 2;
        self.group_bits = (needed + spare).min(GROUP_BITS_MAX);
        self.table = Vec::new();
        self.table.resize(lines, Line::EMPTY);
        (self.base_lines, self.doublings) = (lines as u32, 0);
        self.overflow = Overflow::default();
        // Two batches: the memory for one is prefetched while the other is entered.
        let mut batches = [Batch::default(), Batch::default()];
        let mut turn = 0;
        let groups = std::mem::take(&mut self.groups);
        for (group, ..) in groups.iter() {
            for (lane, name) in groups.names_of(group) {
                let home = self.home(name);
                prefetch(&self.table[home.line as usize]);
                if batches[turn].len == BATCH {
                    turn ^= 1;
                    self.add_slots(&mut batches[turn]);
                }
                batches[turn].push(home, lane);
            }
        }
        self.groups = groups;
        for batch in &mut batches {
            self.add_slots(batch);
        }
    }

    fn add_slots(&mut self, batch: &mut Batch) {
        for (home, lane) in &batch.slots[..batch.len] {
            self.add_slot(home.line, self.slot_of(*home, *lane));
        }
        batch.len = 0;
    }

    #[inline]
    fn add_slot(&mut self, line: u32, slot: u32) {
        let this = &mut self.table[line as usize];
        let place = this.empty().trailing_zeros();
        match this.0.get_mut(place as usize) {
            Some(empty) => *empty = slot,
            None => self.overflow.add(line, slot),
        }
    }
}

/// Names whose slots are being prefetched.
#[derive(Default)]
struct Batch {
    slots: [(Home, Lane); BATCH],
    len: usize,
}

impl Batch {
    fn push(&mut self, home: Home, lane: Lane) {
        self.slots[self.len] = (home, lane);
        self.len += 1;
    }
}
