//! Reads lists in a client's body with a limit on their length or memory.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, SeqAccess, Visitor};

use crate::error::Error;
use crate::memory_budget::Meter;

/// Why a list is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListError {
    /// The list has too many entries.
    TooLong,
    /// The value is not a list, or an entry has another type.
    Wrong,
}

/// Reads a list of at most `max` entries.
///
/// # Errors
/// If there are more than `max` entries, or one of another type.
pub(super) fn entries<'a, T: Deserialize<'a>>(
    raw: &'a str,
    max: usize,
) -> Result<Vec<T>, ListError> {
    let mut list = Vec::new();
    let is_full = Cell::new(false);
    let read = each(raw, |entry| {
        is_full.set(list.len() == max);
        if !is_full.get() {
            list.push(entry);
        }
        !is_full.get()
    });
    match (read, is_full.get()) {
        (_, true) => Err(ListError::TooLong),
        (false, _) => Err(ListError::Wrong),
        (true, _) => Ok(list),
    }
}

/// Whether a text is a list of entries of this type. No entry is kept.
pub(super) fn is_of<'a, T: Deserialize<'a>>(raw: &'a str) -> bool {
    each(raw, |_: T| true)
}

/// Reads token ids. Their memory is charged before it is allocated. `None` if the list contains
/// anything else.
///
/// # Errors
/// If the memory budget is exhausted.
pub(super) fn token_ids(raw: &str, meter: &mut Meter<'_>) -> Result<Option<Vec<u32>>, Error> {
    let most = memchr::memchr_iter(b',', raw.as_bytes()).count() + 1;
    meter.take(most * size_of::<u32>())?;
    let mut ids = Vec::with_capacity(most);
    let read = each(raw, |id| {
        ids.push(id);
        true
    });
    Ok(read.then_some(ids))
}

/// Passes each entry to `take` until it returns `false`. Returns whether the whole list was read.
fn each<'a, T: Deserialize<'a>>(raw: &'a str, take: impl FnMut(T) -> bool) -> bool {
    let mut deserializer = serde_json::Deserializer::from_str(raw);
    let read = Each { take, entry: PhantomData }.deserialize(&mut deserializer);
    read.and_then(|()| deserializer.end()).is_ok()
}

struct Each<T, F> {
    take: F,
    entry: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, F: FnMut(T) -> bool> DeserializeSeed<'de> for Each<T, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(T) -> bool> Visitor<'de> for Each<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element()? {
            if !(self.take)(item) {
                return Err(A::Error::custom("not taken"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::*;
    use crate::error::ErrorKind;
    use crate::memory_budget::MemoryBudget;

    #[test]
    fn no_more_is_built_than_may_be_there() {
        assert_eq!(entries::<u32>("[1, 2]", 2), Ok(vec![1, 2]));
        assert_eq!(entries::<u32>("[]", 0), Ok(vec![]));
        // Nothing after the first surplus entry is read.
        assert_eq!(entries::<u32>("[1,2,3,\"x\"", 2), Err(ListError::TooLong));
        for wrong in ["[1,\"a\"]", "[1", "[1] 2", "7", "{}", "[-1]", "null"] {
            assert_eq!(entries::<u32>(wrong, 2), Err(ListError::Wrong), "{wrong}");
            assert!(!is_of::<u32>(wrong), "{wrong}");
        }
        assert!(is_of::<u32>("[1,2,3]") && is_of::<&RawValue>("[{},[],\"\"]"));
    }

    #[test]
    fn token_ids_are_charged_before_they_are_there() {
        let budget = Arc::new(MemoryBudget::default());
        let full = || Error::new(ErrorKind::Overloaded, "full");
        let mut meter = Meter::new(budget.charge(), 12, &full);
        assert_eq!(token_ids("[1,2, 3]", &mut meter).unwrap(), Some(vec![1, 2, 3]));
        assert_eq!(budget.held_bytes(), 12);
        assert_eq!(token_ids("[1]", &mut meter).unwrap_err().status(), 503);
        let mut meter = Meter::new(budget.charge(), usize::MAX, &full);
        assert_eq!(token_ids("[1,-2]", &mut meter).unwrap(), None);
    }
}
