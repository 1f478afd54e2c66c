//! How a table of names grows, and how memory comes back.

use super::super::line::{EMPTY, LINE_SLOTS, Line};
use super::super::prefetch::prefetch;
use super::{
    BATCH, FREE, FULL, GROUPS_MAX, GROUPS_PER_CHUNK, Home, LANE_BITS_MAX, LANES, Lane, Names,
    SPARSE_GROUPS_MIN, TAG_BITS_MIN,
};

/// The share of slots in use up to which a table is swept rather than enlarged.
const SWEPT: (usize, usize) = (10, 16);

impl Names {
    /// Doubles the table where that is enough and leaves enough of the tags.
    #[cold]
    pub(super) fn enlarge(&mut self, names: usize) {
        let groups = (self.group_count + names).min(GROUPS_MAX);
        let stale = self.used - self.live;
        let doubled = self.table.len() * 2;
        let suits = stale * 4 < self.used
            && (self.used + names) * FULL.1 <= doubled * LINE_SLOTS * FULL.0
            && groups * LANES < 1 << self.lane_bits
            && self.doublings + TAG_BITS_MIN < u32::BITS - self.lane_bits;
        let slots = self.table.len() * LINE_SLOTS;
        if stale > 0 && (self.live + names) * SWEPT.1 <= slots * SWEPT.0 {
            // What is in use is not too much: only what has gone takes the room.
            self.lay_out_in(self.table.len());
        } else if suits {
            self.double();
        } else {
            self.lay_out((self.live + names) * 8 / 3);
        }
    }

    /// Makes two lines of each, in one pass: a slot's tag says which of the two it
    /// goes to. Only behind a full line may there be slots from elsewhere.
    fn double(&mut self) {
        let old = std::mem::take(&mut self.table);
        self.doublings += 1;
        self.table.reserve_exact(old.len() * 2);
        let upper = 1 << (u32::BITS - self.doublings);
        let mut astray = Vec::new();
        let mut full_before = old.last().is_some_and(|line| line.empty() == 0);
        self.used = 0;
        for line in &old {
            let mut halves = [Line::EMPTY, Line::EMPTY];
            if full_before {
                let slots = line.0.iter().filter(|slot| **slot != EMPTY);
                astray.extend(slots.map(|slot| Lane(slot & !(EMPTY << self.lane_bits))));
            } else {
                self.used += line.split(upper, &mut halves);
            }
            self.table.extend(halves);
            full_before = line.empty() == 0;
        }
        for lanes in astray.chunks(BATCH) {
            // What they need comes for all of them at once: names, then slots.
            lanes.iter().for_each(|lane| prefetch(self.group(*lane).0));
            let mut batch = Batch::default();
            for lane in lanes {
                let (group, place) = self.group(*lane);
                if group.present >> place & 1 == 1 {
                    let home = self.home(group.names[place]);
                    prefetch(&self.table[home.line as usize]);
                    batch.push(home, *lane);
                }
            }
            self.used += batch.len;
            self.add_slots(&mut batch);
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
    fn lay_out(&mut self, slots: usize) {
        self.lay_out_in(slots.div_ceil(LINE_SLOTS).max(1));
    }

    #[cold]
    fn lay_out_in(&mut self, lines: usize) {
        // Room for as many doublings as leave enough of a tag.
        let lanes = (self.group_count + BATCH) * 2 * LANES;
        let needed = lanes.next_power_of_two().ilog2();
        let spare = (u32::BITS - TAG_BITS_MIN).saturating_sub(needed) / 2;
        self.lane_bits = (needed + spare).min(LANE_BITS_MAX);
        self.table = Vec::new();
        self.table.resize(lines, Line::EMPTY);
        (self.base_lines, self.doublings) = (lines as u32, 0);
        self.used = self.live;
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
            let mut at = home.line as usize;
            let place = loop {
                let empty = self.table[at].empty();
                if empty != 0 {
                    break empty.trailing_zeros() as usize;
                }
                at = if at + 1 == self.table.len() { 0 } else { at + 1 };
            };
            self.table[at].0[place % LINE_SLOTS] = home.tag << self.lane_bits | lane.0;
        }
        batch.len = 0;
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
