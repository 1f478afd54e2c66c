//! How a table of names grows, and how memory comes back.

use super::super::line::{LINE_SLOTS, Line};
use super::super::prefetch::prefetch;
use super::{
    BATCH, FREE, FULL, GROUPS_MAX, GROUPS_PER_CHUNK, Home, LANE_BITS_MAX, LANES, Lane, Names,
    Overflow, SPARSE_GROUPS_MIN, TAG_BITS_MIN,
};

impl Names {
    /// Doubles the table where that is enough and leaves enough of the tags.
    #[cold]
    pub(super) fn enlarge(&mut self, names: usize) {
        let groups = (self.group_count + names).min(GROUPS_MAX);
        let doubled = self.table.len() * 2;
        let suits = (self.live + names) * FULL.1 <= doubled * LINE_SLOTS * FULL.0
            && groups * LANES < 1 << self.lane_bits
            && self.doublings + TAG_BITS_MIN < u32::BITS - self.lane_bits;
        if suits {
            self.double();
        } else {
            self.lay_out((self.live + names) * 8 / 3);
        }
    }

    /// Makes two lines of each, in one pass: a slot's tag says which of the two it
    /// goes to.
    fn double(&mut self) {
        let lines = std::mem::take(&mut self.table);
        let overflow = std::mem::take(&mut self.overflow);
        self.doublings += 1;
        let upper = u32::BITS - self.doublings;
        self.table.reserve_exact(lines.len() * 2);
        for line in &lines {
            self.table.extend([Line::EMPTY, Line::EMPTY]);
            if let Some(halves) = self.table.last_chunk_mut() {
                line.split(upper, halves);
            }
        }
        for (line, slot) in overflow.iter() {
            self.add_slot(line << 1 | slot >> upper & 1, slot);
        }
    }

    /// Whether most of its groups are free.
    #[inline]
    pub(in super::super) fn is_sparse(&self) -> bool {
        self.group_count > SPARSE_GROUPS_MIN && self.free.len() * 2 > self.group_count
    }

    /// Moves the groups in use together and gives the rest back; says where each
    /// lane has gone. Costs as much as there is, and at least as much went before.
    #[cold]
    pub(in super::super) fn shrink(&mut self) -> impl Fn(Lane) -> Lane + use<> {
        let groups = std::mem::take(&mut self.groups);
        let mut moved = vec![FREE; self.group_count];
        let old_count = std::mem::take(&mut self.group_count);
        self.free = Vec::new();
        for (at, group) in groups.iter().flatten().take(old_count).enumerate() {
            if group.present == 0 {
                continue;
            }
            if let Some(new) = self.add_group() {
                *self.group_mut(new) = group.clone();
                moved[at] = new as u32;
            }
        }
        self.lay_out(self.live * 8 / 3);
        move |Lane(lane)| {
            let (group, place) = (lane as usize / LANES, lane % LANES as u32);
            Lane(moved[group] * LANES as u32 + place)
        }
    }

    /// Lays the table out anew with so many slots.
    #[cold]
    fn lay_out(&mut self, slots: usize) {
        let lines = slots.div_ceil(LINE_SLOTS).max(1);
        // Room for as many doublings as leave enough of a tag.
        let lanes = (self.group_count + BATCH) * 2 * LANES;
        let needed = lanes.next_power_of_two().ilog2();
        let spare = (u32::BITS - TAG_BITS_MIN).saturating_sub(needed) / 2;
        self.lane_bits = (needed + spare).min(LANE_BITS_MAX);
        self.table = Vec::new();
        self.table.resize(lines, Line::EMPTY);
        (self.base_lines, self.doublings) = (lines as u32, 0);
        self.overflow = Overflow::default();
        // Two batches: the memory for one comes while the other is placed.
        let mut batches = [Batch::default(), Batch::default()];
        let mut turn = 0;
        for group in 0..self.group_count {
            let this = &self.groups[group / GROUPS_PER_CHUNK][group % GROUPS_PER_CHUNK];
            let mut left = this.present;
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                let home = self.home(this.names[lane]);
                prefetch(&self.table[home.line as usize]);
                batches[turn].push(home, Lane((group * LANES + lane) as u32));
                left &= left - 1;
            }
            if batches[turn].len + LANES > BATCH {
                turn ^= 1;
                self.add_slots(&mut batches[turn]);
            }
        }
        for batch in &mut batches {
            self.add_slots(batch);
        }
    }

    fn add_slots(&mut self, batch: &mut Batch) {
        for (home, lane) in &batch.slots[..batch.len] {
            self.add_slot(home.line, home.tag << self.lane_bits | lane.0);
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

/// Names whose slots' memory is on its way.
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
