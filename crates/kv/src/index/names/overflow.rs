//! Slots of a table of names whose cache line is full. There are few; they are found by their line.

/// A line's number and one of its slots in one value; [`EMPTY`] if unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell(u64);

/// No line has this number.
const EMPTY: Cell = Cell(u64::MAX);
const CELLS_MIN: usize = 8;

impl Cell {
    fn new(line: u32, slot: u32) -> Self {
        Self(u64::from(line) << 32 | u64::from(slot))
    }

    fn line(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn slot(self) -> u32 {
        self.0 as u32
    }
}

/// Slots by line: a hash table with linear probing that is at most half full.
#[derive(Debug, Default)]
pub(super) struct Overflow {
    /// The length is a power of two, or zero.
    cells: Vec<Cell>,
    len: usize,
}

impl Overflow {
    /// The slots of a line.
    pub(super) fn of(&self, line: u32) -> impl Iterator<Item = u32> + '_ {
        self.places(line)
            .map(|at| self.cells[at])
            .filter(move |cell| cell.line() == line)
            .map(Cell::slot)
    }

    pub(super) fn add(&mut self, line: u32, slot: u32) {
        if (self.len + 1) * 2 > self.cells.len() {
            let cells = (self.cells.len() * 2).max(CELLS_MIN);
            let old = std::mem::replace(&mut self.cells, vec![EMPTY; cells]);
            old.into_iter().filter(|cell| *cell != EMPTY).for_each(|cell| self.put(cell));
        }
        self.put(Cell::new(line, slot));
        self.len += 1;
    }

    /// Removes one slot of a line.
    pub(super) fn take(&mut self, line: u32) -> Option<u32> {
        let at = self.places(line).find(|at| self.cells[*at].line() == line)?;
        let slot = self.cells[at].slot();
        self.close(at);
        Some(slot)
    }

    /// Removes a certain slot of a line, if it exists.
    pub(super) fn remove(&mut self, line: u32, slot: u32) {
        let cell = Cell::new(line, slot);
        let found = self.places(line).find(|at| self.cells[*at] == cell);
        if let Some(at) = found {
            self.close(at);
        }
    }

    /// All slots with their lines.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let cells = self.cells.iter().filter(|cell| **cell != EMPTY);
        cells.map(|cell| (cell.line(), cell.slot()))
    }

    pub(super) fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>()
    }

    fn home(&self, line: u32) -> usize {
        // The upper bits of a product, which puts neighbouring lines far apart.
        let spread = line.wrapping_mul(0x9e37_79b9);
        ((u64::from(spread) * self.cells.len() as u64) >> 32) as usize
    }

    /// The positions at which a search for a line looks, up to the first empty cell.
    fn places(&self, line: u32) -> impl Iterator<Item = usize> + '_ {
        let (home, mask) = (self.home(line), self.cells.len().wrapping_sub(1));
        let places = (0..self.cells.len()).map(move |step| (home + step) & mask);
        places.take_while(|at| self.cells[*at] != EMPTY)
    }

    fn put(&mut self, cell: Cell) {
        let (mut at, mask) = (self.home(cell.line()), self.cells.len() - 1);
        while self.cells[at] != EMPTY {
            at = (at + 1) & mask;
        }
        self.cells[at] = cell;
    }

    /// Empties a cell, and moves later cells forward that would otherwise not be found any more.
    fn close(&mut self, mut gap: usize) {
        self.len -= 1;
        let mask = self.cells.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let cell = self.cells[at];
            if cell == EMPTY {
                break;
            }
            let from_home = |place: usize| place.wrapping_sub(self.home(cell.line())) & mask;
            if from_home(gap) < from_home(at) {
                self.cells[gap] = cell;
                gap = at;
            }
        }
        self.cells[gap] = EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn overflow_slots_are_found_by_their_line_after_any_changes() {
        let mut overflow = Overflow::default();
        let mut model: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut state = 1_u64;
        for round in 0..if cfg!(miri) { 400 } else { 20_000 } {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (line, kind) = ((state >> 33) as u32 % 40, (state >> 60) % 8);
            // First more slots are added than removed, then the reverse.
            match kind {
                0 => {
                    let taken = overflow.take(line).map(|slot| (line, slot));
                    assert_eq!(
                        taken.is_none(),
                        model.range((line, 0)..=(line, u32::MAX)).next().is_none()
                    );
                    assert!(taken.is_none_or(|taken| model.remove(&taken)));
                }
                1..=3 => {
                    if let Some(gone) = model.pop_first() {
                        overflow.remove(gone.0, gone.1);
                    }
                }
                _ => {
                    overflow.add(line, round);
                    model.insert((line, round));
                }
            }
            let mut of: Vec<u32> = overflow.of(line).collect();
            of.sort_unstable();
            let expected = model.range((line, 0)..=(line, u32::MAX)).map(|(_, slot)| *slot);
            assert_eq!(of, expected.collect::<Vec<u32>>());
        }
        let mut all: Vec<_> = overflow.iter().collect();
        all.sort_unstable();
        assert_eq!(all, model.into_iter().collect::<Vec<_>>());
    }
}
