//! Groups of eight consecutive blocks: their names and their common place.

use super::super::strips::Place;
use crate::prefetch::prefetch;

/// The place of a name: its group, and its position there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Lane(pub(in super::super) u32);

pub(super) const LANES: usize = 8;
/// Maximum number of bits for a group's number.
pub(super) const GROUP_BITS_MAX: u32 = 23;
/// The last number is not used, because it is part of the value of an empty slot.
pub(super) const GROUPS_MAX: usize = (1 << GROUP_BITS_MAX) - 1;

const PER_CHUNK: usize = 32;
/// Below this number, groups are not moved together.
const SPARSE_GROUPS_MIN: usize = 4 * PER_CHUNK;
/// In place of a strip: the group is free.
const FREE: u32 = u32::MAX;

impl Lane {
    fn new(group: usize, at: usize) -> Self {
        Self((group * LANES + at) as u32)
    }

    #[inline]
    pub(super) fn group(self) -> usize {
        self.0 as usize / LANES
    }

    #[inline]
    pub(super) fn at(self) -> usize {
        self.0 as usize % LANES
    }

    /// The lane this many positions further, in the same group.
    #[inline]
    pub(super) fn plus(self, lanes: usize) -> Self {
        Self(self.0 + lanes as u32)
    }
}

/// The names of a group. Removed names keep their value: only those that the group marks as present
/// are valid.
#[derive(Clone, Debug)]
struct GroupNames([u64; LANES]);

#[derive(Clone, Debug)]
struct Group {
    /// The place of the first lane's block; the others follow.
    strip: u32,
    offset: u32,
    /// Number of lanes that were used, from the first.
    filled: u8,
    /// Lanes that are in use, one bit each.
    present: u8,
    /// Lanes with copies other than one in the fastest tier, one bit each.
    special: u8,
}

impl Group {
    const UNUSED: Self = Self { strip: FREE, offset: 0, filled: 0, present: 0, special: 0 };

    fn place(&self, at: usize) -> Place {
        Place { strip: self.strip, offset: self.offset + at as u32 }
    }
}

#[derive(Debug)]
struct Chunk {
    names: [GroupNames; PER_CHUNK],
    groups: [Group; PER_CHUNK],
}

/// All groups of a worker.
#[derive(Debug, Default)]
pub(super) struct Groups {
    // Boxed so that growing does not move the chunks.
    #[expect(clippy::vec_box)]
    chunks: Vec<Box<Chunk>>,
    count: usize,
    free: Vec<u32>,
}

impl Groups {
    /// Maximum number of groups that existed at the same time.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    #[inline]
    fn group(&self, group: usize) -> &Group {
        &self.chunks[group / PER_CHUNK].groups[group % PER_CHUNK]
    }

    #[inline]
    fn group_mut(&mut self, group: usize) -> &mut Group {
        &mut self.chunks[group / PER_CHUNK].groups[group % PER_CHUNK]
    }

    #[inline]
    fn names(&self, group: usize) -> &[u64; LANES] {
        &self.chunks[group / PER_CHUNK].names[group % PER_CHUNK].0
    }

    #[inline]
    pub(super) fn name(&self, lane: Lane) -> u64 {
        self.names(lane.group())[lane.at()]
    }

    /// The lane of a name, if it is in this group.
    #[inline]
    pub(super) fn find(&self, group: usize, name: u64) -> Option<Lane> {
        let names = self.names(group).iter().enumerate();
        let alike = names.fold(0, |alike, (at, other)| alike | u8::from(*other == name) << at);
        if alike == 0 {
            return None;
        }
        let found = alike & self.group(group).present;
        (found != 0).then(|| Lane::new(group, found.trailing_zeros() as usize))
    }

    #[inline]
    pub(super) fn place(&self, lane: Lane) -> Place {
        self.group(lane.group()).place(lane.at())
    }

    #[inline]
    pub(super) fn is_special(&self, lane: Lane) -> bool {
        self.group(lane.group()).special >> lane.at() & 1 == 1
    }

    pub(super) fn set_special(&mut self, lane: Lane) {
        self.group_mut(lane.group()).special |= 1 << lane.at();
    }

    /// Prefetches a group, if it exists.
    #[inline]
    pub(super) fn fetch(&self, group: usize) {
        if let Some(chunk) = self.chunks.get(group / PER_CHUNK) {
            prefetch(&chunk.names[group % PER_CHUNK]);
            prefetch(&chunk.groups[group % PER_CHUNK]);
        }
    }

    /// Writes names of consecutive blocks from `place` on into one group, as many as fit; after the
    /// lane `after`, if that is the previous block and its group has room. The names become valid
    /// when they are [settled](Groups::settle). `None` if there is no room.
    #[inline]
    pub(super) fn write(
        &mut self,
        names: &[u64],
        place: Place,
        after: Option<Lane>,
    ) -> Option<(Lane, usize)> {
        let lane = self.new_lane(place, after)?;
        let (group, at) = (lane.group(), lane.at());
        let row = &mut self.chunks[group / PER_CHUNK].names[group % PER_CHUNK].0[at..];
        let count = row.len().min(names.len());
        row[..count].copy_from_slice(&names[..count]);
        Some((lane, count))
    }

    /// Marks this many of the names written from a lane on as present; the others may follow later.
    #[inline]
    pub(super) fn settle_some(&mut self, first: Lane, count: usize) {
        let at = first.at();
        let group = self.group_mut(first.group());
        group.filled = (at + count) as u8;
        group.present |= (((1_u16 << count) - 1) << at) as u8;
    }

    /// Marks this many of the names written from a lane on as present, and frees the other lanes.
    #[inline]
    pub(super) fn settle(&mut self, first: Lane, count: usize) {
        self.settle_some(first, count);
        let group = self.group_mut(first.group());
        if group.present == 0 {
            group.strip = FREE;
            self.free.push(first.group() as u32);
        }
    }

    /// Removes a name.
    #[inline]
    pub(super) fn remove(&mut self, lane: Lane) {
        let group = self.group_mut(lane.group());
        group.present &= !(1 << lane.at());
        if group.present == 0 {
            group.strip = FREE;
            self.free.push(lane.group() as u32);
        }
    }

    /// Number, place and used lanes (one bit each) of each group, in the order of the numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, Place, u8)> + '_ {
        let groups = self.chunks.iter().flat_map(|chunk| &chunk.groups);
        let groups = groups.take(self.count).enumerate();
        groups
            .filter(|(_, group)| group.present != 0)
            .map(|(at, group)| (at, group.place(0), group.present))
    }

    /// The names of a group that are in use, with their lanes.
    #[inline]
    pub(super) fn names_of(&self, group: usize) -> impl Iterator<Item = (Lane, u64)> + '_ {
        let (names, present) = (self.names(group), self.group(group).present);
        let lanes = (0..LANES).filter(move |at| present >> at & 1 == 1);
        lanes.map(move |at| (Lane::new(group, at), names[at]))
    }

    /// Whether most groups are free.
    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.count > SPARSE_GROUPS_MIN && self.free.len() * 2 > self.count
    }

    /// Moves the groups in use together and frees the rest; returns a function that maps old lanes
    /// to new ones.
    pub(super) fn shrink(&mut self) -> impl Fn(Lane) -> Lane + use<> {
        let old = std::mem::take(self);
        let mut moved = vec![FREE; old.count];
        for (at, ..) in old.iter() {
            if let Some(new) = self.add_group() {
                let chunk = &mut self.chunks[new / PER_CHUNK];
                chunk.names[new % PER_CHUNK] = GroupNames(*old.names(at));
                chunk.groups[new % PER_CHUNK] = old.group(at).clone();
                moved[at] = new as u32;
            }
        }
        move |lane| Lane(moved[lane.group()] * LANES as u32 + lane.at() as u32)
    }

    pub(super) fn bytes(&self) -> usize {
        self.free.capacity() * size_of::<u32>() + self.chunks.len() * size_of::<Chunk>()
    }

    #[inline]
    fn new_lane(&mut self, place: Place, after: Option<Lane>) -> Option<Lane> {
        if let Some(after) = after.filter(|after| after.group() < self.count) {
            let group = self.group(after.group());
            let next = usize::from(group.filled);
            if next < LANES && group.place(next) == place {
                return Some(Lane::new(after.group(), next));
            }
        }
        let group = match self.free.pop() {
            Some(group) => group as usize,
            None => self.add_group()?,
        };
        *self.group_mut(group) =
            Group { strip: place.strip, offset: place.offset, filled: 0, present: 0, special: 0 };
        Some(Lane::new(group, 0))
    }

    fn add_group(&mut self) -> Option<usize> {
        if self.count == GROUPS_MAX {
            return None;
        }
        if self.count.is_multiple_of(PER_CHUNK) {
            let names = [const { GroupNames([0; LANES]) }; PER_CHUNK];
            let groups = [const { Group::UNUSED }; PER_CHUNK];
            self.chunks.push(Box::new(Chunk { names, groups }));
        }
        self.count += 1;
        Some(self.count - 1)
    }
}
