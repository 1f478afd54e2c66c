//! One worker's own names for its blocks: from the engine's hash to the block.
//!
//! Names are kept in groups of eight consecutive blocks, so that what belongs to
//! the place is paid once per group; a table of four-byte slots finds them.

mod growth;
mod overflow;

use self::overflow::Overflow;
use super::line::{EMPTY, LINE_SLOTS, Line};
use super::prefetch::prefetch;
use super::strips::Place;

/// Where a name is: its group, and its place there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane(pub(super) u32);

const LANES: usize = 8;
/// The most bits of a slot that say where; the rest is part of the name's hash, more
/// of it the fewer names there are.
const LANE_BITS_MAX: u32 = 26;
/// Groups that a slot can name; the last is left out, since it is in [`EMPTY`].
const GROUPS_MAX: usize = (1 << LANE_BITS_MAX) / LANES - 1;
/// The most names that a worker may have, whatever the configuration says.
pub(super) const NAMES_MAX: usize = GROUPS_MAX;

const GROUPS_PER_CHUNK: usize = 32;
/// So few groups are not worth moving together.
const SPARSE_GROUPS_MIN: usize = 4 * GROUPS_PER_CHUNK;
/// Bits of a tag that must be left after a doubling: fewer would send searches to
/// names that are not meant.
const TAG_BITS_MIN: u32 = 9;
/// The share of slots in use at which a table is enlarged: at eleven of sixteen, one
/// line of fifteen is full.
const FULL: (usize, usize) = (11, 16);
/// Names that are looked up together.
pub(super) const BATCH: usize = 32;
/// In place of a strip: the group is free.
const FREE: u32 = u32::MAX;

/// Where the search for a name begins, and what its slot has of its hash.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    line: u32,
    tag: u32,
}

/// What is known of the name of the block before.
#[derive(Clone, Copy, Debug)]
pub(super) enum After {
    /// It was added last, and its block is the one before in the same strip.
    Last(Lane),
    /// Where it is, if it is known at all.
    Known(Option<Lane>),
}

/// An empty slot of the table; behind the last one of its line where that is full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    line: u32,
    place: u32,
}

#[derive(Clone, Debug)]
struct Group {
    names: [u64; LANES],
    /// Of the first lane; the others follow.
    strip: u32,
    offset: u32,
    /// Lanes that were given out, from the first.
    filled: u8,
    /// Lanes that are in use, one bit each.
    present: u8,
    /// Lanes with copies other than one in the fastest tier, one bit each.
    special: u8,
}

/// The names of one worker.
#[derive(Debug, Default)]
pub(super) struct Names {
    table: Vec<Line>,
    /// Slots whose line in the table is full.
    overflow: Overflow,
    /// Lines of the table when it was laid out, and how often they were doubled since.
    base_lines: u32,
    doublings: u32,
    /// Bits of a slot that say where.
    lane_bits: u32,
    live: usize,
    groups: Vec<Box<[Group]>>,
    group_count: usize,
    free: Vec<u32>,
}

/// Engines may number their blocks in sequence: one wide multiplication spreads them.
#[inline]
fn mix(name: u64) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let product = u128::from(name ^ MULTIPLIER) * u128::from(MULTIPLIER);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Names {
    /// Names in use.
    pub(super) fn len(&self) -> usize {
        self.live
    }

    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }

    #[inline]
    fn group(&self, lane: Lane) -> (&Group, usize) {
        let (group, place) = (lane.0 as usize / LANES, lane.0 as usize % LANES);
        (&self.groups[group / GROUPS_PER_CHUNK][group % GROUPS_PER_CHUNK], place)
    }

    #[inline]
    fn group_mut(&mut self, group: usize) -> &mut Group {
        &mut self.groups[group / GROUPS_PER_CHUNK][group % GROUPS_PER_CHUNK]
    }

    #[inline]
    fn is(&self, lane: Lane, name: u64) -> bool {
        let (group, place) = self.group(lane);
        group.names[place] == name && group.present >> place & 1 == 1
    }

    /// The block that a name stands for.
    #[inline]
    pub(super) fn place(&self, lane: Lane) -> Place {
        let (group, place) = self.group(lane);
        Place { strip: group.strip, offset: group.offset + place as u32 }
    }

    /// Whether its copies are other than one in the fastest tier.
    #[inline]
    pub(super) fn is_special(&self, lane: Lane) -> bool {
        let (group, place) = self.group(lane);
        group.special >> place & 1 == 1
    }

    pub(super) fn set_special(&mut self, lane: Lane) {
        let (group, place) = (lane.0 as usize / LANES, lane.0 as usize % LANES);
        self.group_mut(group).special |= 1 << place;
    }

    /// Where a name is.
    #[inline]
    pub(super) fn find(&self, name: u64) -> Option<Lane> {
        if self.table.is_empty() {
            return None;
        }
        self.find_from(self.home(name), name).ok()
    }

    /// Where a name is, or the empty slot where its search ended.
    #[inline]
    pub(super) fn find_from(&self, home: Home, name: u64) -> Result<Lane, Slot> {
        let line = &self.table[home.line as usize];
        let mut alike = line.equal(home.tag, self.lane_bits);
        while alike != 0 {
            let slot = line.0[alike.trailing_zeros() as usize % LINE_SLOTS];
            let lane = self.lane_in(slot);
            if slot != EMPTY && self.is(lane, name) {
                return Ok(lane);
            }
            alike &= alike - 1;
        }
        let empty = line.empty();
        if empty == 0 {
            return self.find_beyond(home, name);
        }
        Err(Slot { line: home.line, place: empty.trailing_zeros() })
    }

    /// Where a name is whose line is full, without it.
    #[cold]
    fn find_beyond(&self, home: Home, name: u64) -> Result<Lane, Slot> {
        let mut slots = self.overflow.of(home.line);
        let found = slots
            .find(|slot| slot >> self.lane_bits == home.tag && self.is(self.lane_in(*slot), name));
        let full = Slot { line: home.line, place: LINE_SLOTS as u32 };
        found.map(|slot| self.lane_in(slot)).ok_or(full)
    }

    #[inline]
    fn lane_in(&self, slot: u32) -> Lane {
        Lane(slot & !(EMPTY << self.lane_bits))
    }

    /// Where the searches for up to [`BATCH`] names begin, their memory already on
    /// its way.
    #[inline]
    pub(super) fn homes(&self, names: impl Iterator<Item = u64>) -> [Home; BATCH] {
        let mut homes = [Home::default(); BATCH];
        for (home, name) in homes.iter_mut().zip(names) {
            *home = self.home(name);
            prefetch(&self.table[home.line as usize]);
        }
        homes
    }

    /// Has the slots of up to [`BATCH`] names fetched.
    #[inline]
    pub(super) fn fetch(&self, names: impl Iterator<Item = u64>) {
        if !self.table.is_empty() {
            self.homes(names);
        }
    }

    /// Makes room for so many more names, so that slots stay where they are while
    /// those are added.
    #[inline]
    pub(super) fn make_room(&mut self, names: usize) {
        let groups = (self.group_count + names).min(GROUPS_MAX);
        let slots = self.table.len() * LINE_SLOTS;
        if (self.live + names) * FULL.1 > slots * FULL.0 || groups * LANES >= 1 << self.lane_bits {
            self.enlarge(names);
        }
    }

    /// The same where the name is probably the neighbour of one that was asked for
    /// before: engines evict blocks in the order of their chain.
    #[inline]
    pub(super) fn find_near(&self, near: Option<Lane>, name: u64) -> Option<Lane> {
        if let Some(Lane(near)) = near {
            for lane in [near.wrapping_sub(1), near + 1] {
                if (lane as usize) < self.group_count * LANES && self.is(Lane(lane), name) {
                    return Some(Lane(lane));
                }
            }
        }
        self.find(name)
    }

    /// Counts names that were added by [`Names::insert_at`].
    #[inline]
    pub(super) fn count(&mut self, added: usize) {
        self.live += added;
    }

    /// Adds a name where the search for it ended; it is still to be counted.
    #[inline(always)]
    pub(super) fn insert_at(
        &mut self,
        slot: Slot,
        home: Home,
        name: u64,
        place: Place,
        after: After,
    ) -> Option<Lane> {
        let lane = match after {
            // The lane behind is free, and stands for the block behind.
            After::Last(Lane(last)) if last as usize % LANES < LANES - 1 => Lane(last + 1),
            After::Last(_) => self.new_lane(place, None)?,
            After::Known(lane) => self.new_lane(place, lane)?,
        };
        let group = self.group_mut(lane.0 as usize / LANES);
        let bit = 1 << (lane.0 as usize % LANES);
        group.names[lane.0 as usize % LANES] = name;
        group.filled = (lane.0 as usize % LANES) as u8 + 1;
        group.present |= bit;
        let value = home.tag << self.lane_bits | lane.0;
        match self.table[slot.line as usize].0.get_mut(slot.place as usize) {
            Some(empty) => *empty = value,
            None => self.overflow.add(slot.line, value),
        }
        Some(lane)
    }

    /// Takes a name out.
    #[inline]
    pub(super) fn remove(&mut self, lane: Lane) {
        let (group_at, place) = (lane.0 as usize / LANES, lane.0 as usize % LANES);
        let group = self.group_mut(group_at);
        group.present &= !(1 << place);
        let name = group.names[place];
        if group.present == 0 {
            group.strip = FREE;
            self.free.push(group_at as u32);
        }
        self.live -= 1;
        if self.live == 0 {
            *self = Self::default();
        } else {
            self.empty_slot(self.home(name), lane);
        }
    }

    /// Empties a name's slot.
    #[inline]
    fn empty_slot(&mut self, home: Home, lane: Lane) {
        let slot = home.tag << self.lane_bits | lane.0;
        let line = &mut self.table[home.line as usize];
        let (same, empty) = (line.equal(slot, 0), line.empty());
        if same != 0 {
            // Only a full line has slots elsewhere.
            let other = if empty == 0 { self.overflow.take(home.line) } else { None };
            line.0[same.trailing_zeros() as usize % LINE_SLOTS] = other.unwrap_or(EMPTY);
        } else {
            self.overflow.remove(home.line, slot);
        }
    }

    /// All names with their blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Lane, u64, Place)> + '_ {
        let groups = self.groups.iter().flatten().take(self.group_count).enumerate();
        groups.flat_map(|(at, group)| {
            let lanes = (0..LANES).filter(|lane| group.present >> lane & 1 == 1);
            lanes.map(move |lane| {
                let place = Place { strip: group.strip, offset: group.offset + lane as u32 };
                (Lane((at * LANES + lane) as u32), group.names[lane], place)
            })
        })
    }

    /// The places of all names, a group at a time: its first block, and one bit for
    /// each of the eight from there on.
    pub(super) fn groups(&self) -> impl Iterator<Item = (Place, u8)> + '_ {
        let groups = self.groups.iter().flatten().take(self.group_count);
        groups
            .filter(|group| group.present != 0)
            .map(|group| (Place { strip: group.strip, offset: group.offset }, group.present))
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<Line>()
            + self.overflow.bytes()
            + self.free.capacity() * size_of::<u32>()
            + self.groups.len() * GROUPS_PER_CHUNK * size_of::<Group>()
    }

    /// A name's hash as a fraction of the table as it was laid out: its line there,
    /// and what is behind the point. Each doubling moves the point by one bit.
    #[inline]
    fn home(&self, name: u64) -> Home {
        let product = u128::from(mix(name)) * u128::from(self.base_lines);
        let (line, fraction) = ((product >> 64) as u32, product as u64);
        let below = ((fraction >> 32) >> (32 - self.doublings)) as u32;
        let tag = (fraction >> 32) as u32 >> self.lane_bits;
        Home { line: line << self.doublings | below, tag }
    }

    #[inline]
    fn new_lane(&mut self, place: Place, after: Option<Lane>) -> Option<Lane> {
        if let Some(after) = after.filter(|after| (after.0 as usize) < self.group_count * LANES) {
            let (group, _) = self.group(after);
            let next = u32::from(group.filled);
            if group.strip == place.strip
                && (next as usize) < LANES
                && group.offset + next == place.offset
            {
                return Some(Lane(after.0 / LANES as u32 * LANES as u32 + next));
            }
        }
        let group = match self.free.pop() {
            Some(group) => group as usize,
            None => self.add_group()?,
        };
        let this = self.group_mut(group);
        (this.strip, this.offset) = (place.strip, place.offset);
        // The names are those of before: they count where they are present.
        (this.filled, this.present, this.special) = (0, 0, 0);
        Some(Lane((group * LANES) as u32))
    }

    fn add_group(&mut self) -> Option<usize> {
        if self.group_count == GROUPS_MAX {
            return None;
        }
        if self.group_count.is_multiple_of(GROUPS_PER_CHUNK) {
            let free = Group {
                names: [0; LANES],
                strip: FREE,
                offset: 0,
                filled: 0,
                present: 0,
                special: 0,
            };
            self.groups.push(vec![free; GROUPS_PER_CHUNK].into());
        }
        self.group_count += 1;
        Some(self.group_count - 1)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn add(names: &mut Names, name: u64, place: Place) -> Lane {
        names.make_room(1);
        let home = names.homes([name].into_iter())[0];
        let slot = names.find_from(home, name).unwrap_err();
        let lane = names.insert_at(slot, home, name, place, After::Known(None)).unwrap();
        names.count(1);
        lane
    }

    #[test]
    fn names_are_found_through_growth_removal_and_moves() {
        let mut names = Names::default();
        // As many as take several doublings, with names in sequence, one to a group.
        let count = if cfg!(miri) { 300 } else { 30_000 };
        for name in 0..count {
            add(&mut names, name, Place { strip: name as u32, offset: 7 });
        }
        for name in 0..count {
            let lane = names.find(name).unwrap();
            assert_eq!(names.place(lane), Place { strip: name as u32, offset: 7 });
            if name % 8 > 0 {
                names.remove(lane);
            }
        }
        assert_eq!(names.len() as u64, count.div_ceil(8));
        assert!(names.is_sparse());
        let before = names.bytes();
        let old = names.find(16).unwrap();
        let moved = names.shrink();
        assert_eq!(names.find(16), Some(moved(old)));
        assert!(names.bytes() * 3 < before);
        for name in 0..count {
            assert_eq!(names.find(name).is_some(), name % 8 == 0, "{name}");
        }
        assert_eq!(names.iter().count(), names.len());
    }
}
