//! What was used in the last minute and on the current day (UTC).

/// Number of parts of a window. One more part is counted, so that each window of this length is
/// covered wherever it begins; the count can be too high by what one part holds, and never too low.
const PARTS: u64 = 120;

/// Milliseconds of a day.
pub(crate) const DAY_MS: u64 = 24 * 3600 * 1000;

/// What was counted in one part of a window.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    number: u64,
    requests: u64,
    tokens: u64,
}

/// Requests and tokens of a sliding window, in memory of a fixed size.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    part_ms: u64,
    /// The part of time that was last counted in.
    newest: u64,
    /// The part with the number `n` is at the index `n % (PARTS + 1)`.
    parts: Box<[Part]>,
    requests: u64,
    tokens: u64,
}

/// A column of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Requests,
    Tokens,
}

impl Window {
    /// A window of at least `length_ms`.
    pub(crate) fn new(length_ms: u64) -> Self {
        Self {
            part_ms: length_ms.div_ceil(PARTS).max(1),
            newest: 0,
            parts: vec![Part::default(); PARTS as usize + 1].into(),
            requests: 0,
            tokens: 0,
        }
    }

    /// Forgets what is too old at `now_ms`. An earlier time than the last one changes nothing.
    pub(crate) fn advance(&mut self, now_ms: u64) {
        let number = now_ms / self.part_ms;
        if number <= self.newest {
            return;
        }
        for number in (number - (number - self.newest - 1).min(PARTS))..=number {
            let index = self.index(number);
            let part =
                std::mem::replace(&mut self.parts[index], Part { number, ..Part::default() });
            self.requests -= part.requests;
            self.tokens -= part.tokens;
        }
        self.newest = number;
    }

    /// Counts a request, and returns the number of the part that it is counted in.
    pub(crate) fn add(&mut self, tokens: u64) -> u64 {
        let index = self.index(self.newest);
        let part = &mut self.parts[index];
        part.requests += 1;
        part.tokens += tokens;
        self.requests += 1;
        self.tokens += tokens;
        self.newest
    }

    /// Replaces a number of tokens that was counted in a part by another one. A part that is not in
    /// the window any more does not change.
    pub(crate) fn correct(&mut self, number: u64, counted: u64, actual: u64) {
        let index = self.index(number);
        let part = &mut self.parts[index];
        if part.number == number {
            part.tokens = part.tokens - counted + actual;
            self.tokens = self.tokens - counted + actual;
        }
    }

    /// What is used of a column.
    pub(crate) fn used(&self, column: Column) -> u64 {
        match column {
            Column::Requests => self.requests,
            Column::Tokens => self.tokens,
        }
    }

    /// Milliseconds from `now_ms` until at most `most` of a column is used, if nothing is added.
    pub(crate) fn wait_ms(&self, column: Column, most: u64, now_ms: u64) -> u64 {
        let mut used = self.used(column);
        let oldest = self.newest.saturating_sub(PARTS);
        let last = match most {
            _ if used <= most => return 0,
            // Each reply asks for this. The youngest part that counts is found first from the end.
            0 => (oldest..=self.newest).rev().find(|number| self.used_in(*number, column) > 0),
            _ => (oldest..=self.newest).find(|number| {
                used -= self.used_in(*number, column);
                used <= most
            }),
        };
        let free_from = last.map_or(0, |number| (number + PARTS + 1) * self.part_ms);
        free_from.saturating_sub(now_ms)
    }

    /// What is used of a column in one part.
    fn used_in(&self, number: u64, column: Column) -> u64 {
        let part = &self.parts[self.index(number)];
        match column {
            _ if part.number != number => 0,
            Column::Requests => part.requests,
            Column::Tokens => part.tokens,
        }
    }

    fn index(&self, number: u64) -> usize {
        (number % (PARTS + 1)) as usize
    }
}

/// The tokens of the current day and of the day before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Day {
    /// Days since 1970.
    number: u64,
    tokens: u64,
    before: u64,
}

impl Day {
    /// Begins another day if `now_ms` is in a later one.
    pub(crate) fn advance(&mut self, now_ms: u64) {
        let number = now_ms / DAY_MS;
        if number > self.number {
            let before = if number == self.number + 1 { self.tokens } else { 0 };
            *self = Self { number, tokens: 0, before };
        }
    }

    /// Counts tokens, and returns the number of the day.
    pub(crate) fn add(&mut self, tokens: u64) -> u64 {
        self.tokens += tokens;
        self.number
    }

    /// Replaces a number of tokens that was counted on a day by another one. An earlier day does not
    /// change.
    pub(crate) fn correct(&mut self, number: u64, counted: u64, actual: u64) {
        if number == self.number {
            self.tokens = self.tokens - counted + actual;
        }
    }

    /// Tokens of the current day.
    pub(crate) fn used(&self) -> u64 {
        self.tokens
    }

    /// Tokens that count as used for replicas whose clock differs by up to `margin_ms`, for which the
    /// day before may not have ended.
    pub(crate) fn used_within(&self, margin_ms: u64, now_ms: u64) -> u64 {
        let is_young = now_ms.saturating_sub(self.number * DAY_MS) < margin_ms;
        if is_young { self.tokens.max(self.before) } else { self.tokens }
    }

    /// Milliseconds from `now_ms` to the end of the day.
    pub(crate) fn rest_ms(&self, now_ms: u64) -> u64 {
        ((self.number + 1) * DAY_MS).saturating_sub(now_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The window never counts less than a list of all requests, and at most one part more.
        #[test]
        fn a_window_counts_all_that_is_younger_than_its_length(
            steps in prop::collection::vec((0_u64..20_000, 0_u64..50), 1..200),
        ) {
            let mut window = Window::new(60_000);
            let mut all: Vec<(u64, u64)> = Vec::new();
            let mut now = 1_700_000_000_000;
            for (pause, tokens) in steps {
                now += pause;
                window.advance(now);
                window.add(tokens);
                all.push((now, tokens));
                let since = |age: u64| all.iter().filter(move |(at, _)| at + age > now);
                let sum = |age| since(age).map(|(_, tokens)| tokens).sum::<u64>();
                let used = window.used(Column::Tokens);
                prop_assert!(sum(60_000) <= used && used <= sum(60_500));
                let requests = window.used(Column::Requests) as usize;
                prop_assert!(since(60_000).count() <= requests && requests <= since(60_500).count());
            }
        }

        /// The wait is exact: a millisecond earlier, too much is used.
        #[test]
        fn a_wait_ends_when_enough_is_forgotten(
            steps in prop::collection::vec((0_u64..3_000, 0_u64..50), 1..100),
            most in prop_oneof![1 => Just(0), 2 => 0_u64..500],
            later in 0_u64..70_000,
        ) {
            let mut window = Window::new(60_000);
            let mut now = 1_700_000_000_000;
            for (pause, tokens) in steps {
                now += pause;
                window.advance(now);
                window.add(tokens);
            }
            now += later;
            window.advance(now);
            let wait = window.wait_ms(Column::Tokens, most, now);
            let mut then = window.clone();
            then.advance(now + wait);
            prop_assert!(then.used(Column::Tokens) <= most);
            if wait > 0 {
                window.advance(now + wait - 1);
                prop_assert!(window.used(Column::Tokens) > most);
            }
        }
    }

    #[test]
    fn a_correction_changes_the_part_in_which_the_tokens_were_counted() {
        let mut window = Window::new(60_000);
        window.advance(1_000_000);
        let part = window.add(10);
        window.advance(1_030_000);
        window.add(5);
        window.correct(part, 10, 3);
        assert_eq!(window.used(Column::Tokens), 8);
        window.advance(1_060_500);
        assert_eq!(window.used(Column::Tokens), 5);
        window.correct(part, 3, 100);
        assert_eq!(window.used(Column::Tokens), 5, "the part is not in the window any more");
    }

    #[test]
    fn a_day_ends_at_midnight_and_counts_a_while_longer_for_slow_clocks() {
        let mut day = Day::default();
        day.advance(DAY_MS * 3 - 1);
        let number = day.add(7);
        assert_eq!((day.used(), day.rest_ms(DAY_MS * 3 - 1)), (7, 1));
        day.advance(DAY_MS * 3);
        day.correct(number, 7, 9);
        assert_eq!(day.used(), 0);
        assert_eq!(day.used_within(1000, DAY_MS * 3 + 999), 7);
        assert_eq!(day.used_within(1000, DAY_MS * 3 + 1000), 0);
    }
}
