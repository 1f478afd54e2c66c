//! One worker's names for its blocks: maps the engine's hash to the block.
//!
//! Names are kept in groups of eight consecutive blocks, so that a group shares the memory for its
//! place; a table of four-byte slots finds them.

mod groups;
mod growth;
mod overflow;

pub(super) use self::groups::Lane;

use self::groups::{GROUPS_MAX, Groups};
use self::overflow::Overflow;
use super::line::{EMPTY, LINE_SLOTS, Line};
use super::strips::Place;
use crate::prefetch::prefetch;

/// Maximum number of names of a worker, whatever the configuration says.
pub(super) const NAMES_MAX: usize = GROUPS_MAX;

/// Minimum number of tag bits after a doubling. With fewer, searches would often follow slots of
/// other names, each of which costs a memory access.
const TAG_BITS_MIN: u32 = 12;
/// The share of used slots at which a table is enlarged: at eleven of sixteen, one line of ten is
/// full.
const FULL: (usize, usize) = (11, 16);
/// Number of names that are looked up together.
pub(super) const BATCH: usize = 32;

/// Names that are looked up together, and where the search for each begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    names: [u64; BATCH],
    homes: [Home; BATCH],
    len: usize,
}

/// Where the search for a name begins, and the bits of its hash that its slot contains.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    line: u32,
    tag: u32,
}

impl Row {
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// A slot of the table. A place after the last slot of a line stands for the overflow of a full
/// line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    line: u32,
    place: u32,
}

/// A slot that may belong to a name, and its value.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Guess {
    at: Slot,
    slot: u32,
}

/// The names of one worker.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Each slot has the number of a name's group in its lower bits, and a part of the name's hash,
    /// its tag, above.
    table: Vec<Line>,
    /// Slots whose line in the table is full.
    overflow: Overflow,
    /// Number of lines when the table was built, and number of doublings since.
    base_lines: u32,
    doublings: u32,
    /// Number of bits of a slot for the group's number. The rest is the tag, which is longer if
    /// there are fewer groups.
    group_bits: u32,
    live: usize,
    groups: Groups,
}

/// Engines may number their blocks in sequence: one wide multiplication distributes them.
#[inline]
pub(super) fn spread_name(name: u64) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let product = u128::from(name ^ MULTIPLIER) * u128::from(MULTIPLIER);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Names {
    /// Number of names.
    pub(super) fn len(&self) -> usize {
        self.live
    }

    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// The block that a name stands for.
    #[inline]
    pub(super) fn place(&self, lane: Lane) -> Place {
        self.groups.place(lane)
    }

    /// Whether a name's copies are other than one in the fastest tier.
    #[inline]
    pub(super) fn is_special(&self, lane: Lane) -> bool {
        self.groups.is_special(lane)
    }

    pub(super) fn set_special(&mut self, lane: Lane) {
        self.groups.set_special(lane);
    }

    /// The lane of a name.
    #[inline]
    pub(super) fn find(&self, name: u64) -> Option<Lane> {
        if self.table.is_empty() {
            return None;
        }
        self.find_from(self.home(name), name).ok().map(|(lane, _)| lane)
    }

    /// The lane of a name and its slot; or the empty slot at which its search ended.
    #[inline]
    pub(super) fn find_from(&self, home: Home, name: u64) -> Result<(Lane, Slot), Slot> {
        let line = &self.table[home.line as usize];
        let alike = line.equal(home.tag, self.group_bits);
        if alike != 0
            && let Some(found) = self.find_alike(home.line, alike, name)
        {
            return Ok(found);
        }
        let empty = line.empty();
        if empty == 0 {
            return self.find_beyond(home, name);
        }
        Err(Slot { line: home.line, place: empty.trailing_zeros() })
    }

    /// The lane of a name and its slot, among these slots of a line.
    #[inline(never)]
    fn find_alike(&self, line: u32, mut alike: u16, name: u64) -> Option<(Lane, Slot)> {
        while alike != 0 {
            let place = alike.trailing_zeros();
            let slot = self.table[line as usize].0[place as usize % LINE_SLOTS];
            if slot != EMPTY
                && let Some(lane) = self.groups.find(self.group_in(slot), name)
            {
                return Some((lane, Slot { line, place }));
            }
            alike &= alike - 1;
        }
        None
    }

    /// The lane of a name whose line is full and does not contain it.
    #[cold]
    fn find_beyond(&self, home: Home, name: u64) -> Result<(Lane, Slot), Slot> {
        let beyond = Slot { line: home.line, place: LINE_SLOTS as u32 };
        let slots = self.overflow.of(home.line).filter(|slot| slot >> self.group_bits == home.tag);
        let found = slots.filter_map(|slot| self.groups.find(self.group_in(slot), name)).next();
        found.map(|lane| (lane, beyond)).ok_or(beyond)
    }

    #[inline]
    fn group_in(&self, slot: u32) -> usize {
        (slot & !(EMPTY << self.group_bits)) as usize
    }

    /// Up to [`BATCH`] names; prefetches the memory where their searches begin.
    #[inline]
    pub(super) fn row(&self, names: impl Iterator<Item = u64>) -> Row {
        let mut row = Row { names: [0; BATCH], homes: [Home::default(); BATCH], len: 0 };
        for (at, name) in names.take(BATCH).enumerate() {
            let home = self.home(name);
            prefetch(&self.table[home.line as usize]);
            (row.names[at], row.homes[at]) = (name, home);
            row.len = at + 1;
        }
        row
    }

    /// Prefetches the slots of up to [`BATCH`] names.
    #[inline]
    pub(super) fn fetch(&self, names: impl Iterator<Item = u64>) {
        if !self.table.is_empty() {
            self.row(names);
        }
    }

    /// Reads the slots of names that probably exist, and prefetches the groups to which these slots
    /// refer.
    #[inline]
    pub(super) fn guesses(&self, names: impl Iterator<Item = u64>) -> [Guess; BATCH] {
        let mut guesses = [Guess::default(); BATCH];
        if self.table.is_empty() {
            return guesses;
        }
        for (guess, name) in guesses.iter_mut().zip(names) {
            let home = self.home(name);
            let line = &self.table[home.line as usize];
            let place = line.equal(home.tag, self.group_bits).trailing_zeros();
            let slot = line.0[place as usize % LINE_SLOTS];
            *guess = Guess { at: Slot { line: home.line, place }, slot };
            self.groups.fetch(self.group_in(slot));
        }
        guesses
    }

    /// The lane of a name and its slot, from a guess that may be out of date.
    #[inline]
    pub(super) fn find_guessed(&self, guess: Guess, name: u64) -> Option<(Lane, Slot)> {
        let line = self.table.get(guess.at.line as usize)?;
        if line.0.get(guess.at.place as usize) == Some(&guess.slot)
            && guess.slot != EMPTY
            && let Some(lane) = self.groups.find(self.group_in(guess.slot), name)
        {
            return Some((lane, guess.at));
        }
        self.find_from(self.home(name), name).ok()
    }

    /// Makes room for this many further names, so that slots do not move while these are added.
    #[inline]
    pub(super) fn make_room(&mut self, names: usize) {
        let groups = (self.groups.count() + names).min(GROUPS_MAX);
        let slots = self.table.len() * LINE_SLOTS;
        if (self.live + names) * FULL.1 > slots * FULL.0 || groups >= 1 << self.group_bits {
            self.enlarge(names);
        }
    }

    /// Adds names `from` to `to` of a row, for consecutive blocks from `place` on, after the lane
    /// `after`; room for them must have been made. Stops before a name that already exists, or if
    /// there are too many names. Returns the number of added names and the lane of the last.
    #[inline]
    pub(super) fn insert(
        &mut self,
        row: &Row,
        from: usize,
        to: usize,
        place: Place,
        after: Option<Lane>,
    ) -> (usize, Option<Lane>) {
        let (mut at, mut last) = (from, after);
        while at < to {
            let place = Place { offset: place.offset + (at - from) as u32, ..place };
            let Some((lane, count)) = self.groups.write(&row.names[at..to], place, last) else {
                break;
            };
            let added = self.insert_group(&row.names[at..at + count], &row.homes[at..], lane);
            self.groups.settle(lane, added);
            if added > 0 {
                last = Some(lane.plus(added - 1));
            }
            at += added;
            if added < count {
                break;
            }
        }
        self.live += at - from;
        (at - from, last)
    }

    /// Enters names that were written to a group's lanes, up to one that already exists; returns
    /// their number.
    #[inline]
    fn insert_group(&mut self, names: &[u64], homes: &[Home], lane: Lane) -> usize {
        for (at, (name, home)) in names.iter().zip(homes).enumerate() {
            let value = self.slot_of(*home, lane);
            let line = &mut self.table[home.line as usize];
            let (alike, empty) = (line.equal(home.tag, self.group_bits), line.empty());
            if alike != 0 || empty == 0 {
                // This is rare; in this case the names of this row must be visible to the search,
                // too.
                self.groups.settle_some(lane, at);
                match self.find_from(*home, *name) {
                    Ok(_) => return at,
                    Err(slot) => self.put(slot, value),
                }
                continue;
            }
            line.0[empty.trailing_zeros() as usize % LINE_SLOTS] = value;
        }
        names.len()
    }

    #[inline(never)]
    fn put(&mut self, slot: Slot, value: u32) {
        match self.table[slot.line as usize].0.get_mut(slot.place as usize) {
            Some(empty) => *empty = value,
            None => self.overflow.add(slot.line, value),
        }
    }

    /// The lane of a name of a row, if the name exists.
    #[inline]
    pub(super) fn find_in(&self, row: &Row, at: usize) -> Option<Lane> {
        self.find_from(row.homes[at], row.names[at]).ok().map(|(lane, _)| lane)
    }

    #[inline]
    fn slot_of(&self, home: Home, lane: Lane) -> u32 {
        home.tag << self.group_bits | lane.group() as u32
    }

    /// Removes a name.
    pub(super) fn remove(&mut self, lane: Lane) {
        let home = self.home(self.groups.name(lane));
        let same = self.table[home.line as usize].equal(self.slot_of(home, lane), 0);
        // Equal slots of one line are interchangeable.
        self.remove_at(lane, Slot { line: home.line, place: same.trailing_zeros() });
    }

    /// Removes a name whose slot is known.
    #[inline]
    pub(super) fn remove_at(&mut self, lane: Lane, at: Slot) {
        self.live -= 1;
        if self.live == 0 {
            *self = Self::default();
            return;
        }
        let line = &mut self.table[at.line as usize];
        let is_full = line.empty() == 0;
        match line.0.get_mut(at.place as usize) {
            // Only a full line has slots in the overflow.
            Some(slot) if is_full => *slot = self.overflow.take(at.line).unwrap_or(EMPTY),
            Some(slot) => *slot = EMPTY,
            None => {
                let home = self.home(self.groups.name(lane));
                self.overflow.remove(at.line, self.slot_of(home, lane));
            }
        }
        self.groups.remove(lane);
    }

    /// All names with their blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Lane, u64, Place)> + '_ {
        let names = self.groups.iter().flat_map(|(group, ..)| self.groups.names_of(group));
        names.map(|(lane, name)| (lane, name, self.place(lane)))
    }

    /// The places of all names by group: the place of its first block, and one bit for each of its
    /// eight blocks.
    pub(super) fn groups(&self) -> impl Iterator<Item = (Place, u8)> + '_ {
        self.groups.iter().map(|(_, place, present)| (place, present))
    }

    /// Memory of the names in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<Line>() + self.overflow.bytes() + self.groups.bytes()
    }

    /// A name's hash as a fraction of the table as it was built: the integer part is the line, and
    /// the first bits of the fractional part are the tag. Each doubling appends one further bit of
    /// the fractional part to the line.
    #[inline]
    fn home(&self, name: u64) -> Home {
        let product = u128::from(spread_name(name)) * u128::from(self.base_lines);
        let (line, fraction) = ((product >> 64) as u32, product as u64);
        let below = ((fraction >> 32) >> (32 - self.doublings)) as u32;
        let tag = (fraction >> 32) as u32 >> self.group_bits;
        Home { line: line << self.doublings | below, tag }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn add(names: &mut Names, name: u64, place: Place) -> Lane {
        names.make_room(1);
        let row = names.row([name].into_iter());
        assert_eq!(names.find_in(&row, 0), None);
        let (added, lane) = names.insert(&row, 0, row.len(), place, None);
        assert_eq!(added, 1);
        lane.unwrap()
    }

    #[test]
    fn names_are_found_through_growth_removal_and_moves() {
        let mut names = Names::default();
        // Enough for several doublings, with names in sequence, one to a group.
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
