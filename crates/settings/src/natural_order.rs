//! The order of names in lists for people: `p2` comes before `p10`.

use std::cmp::Ordering;

/// Compares two names: runs of digits by their number, everything else by its characters. Names that
/// differ only in leading zeros are ordered as texts, so that only equal names are equal.
pub fn compare(left: &str, right: &str) -> Ordering {
    let (mut left_rest, mut right_rest) = (left, right);
    while let (Some(a), Some(b)) = (left_rest.chars().next(), right_rest.chars().next()) {
        if a.is_ascii_digit() && b.is_ascii_digit() {
            let (number, other);
            (number, left_rest) = split_number(left_rest);
            (other, right_rest) = split_number(right_rest);
            let order = number.len().cmp(&other.len()).then_with(|| number.cmp(other));
            if order.is_ne() {
                return order;
            }
        } else if a == b {
            (left_rest, right_rest) = (&left_rest[a.len_utf8()..], &right_rest[b.len_utf8()..]);
        } else {
            return a.cmp(&b);
        }
    }
    left_rest.len().cmp(&right_rest.len()).then_with(|| left.cmp(right))
}

/// The number at the start of a text, without leading zeros, and what follows it.
fn split_number(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    (number.trim_start_matches('0'), rest)
}

/// A name that is ordered by [`compare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Natural<'n>(pub &'n str);

impl Ord for Natural<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        compare(self.0, other.0)
    }
}

impl PartialOrd for Natural<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_in_names_are_compared_as_numbers() {
        let mut names = ["p10", "p2", "d1", "p1", "p1b", "p01", "pod-7-12", "pod-7-9", "p", "é2"];
        names.sort_by(|left, right| compare(left, right));
        assert_eq!(
            names,
            ["d1", "p", "p01", "p1", "p1b", "p2", "p10", "pod-7-9", "pod-7-12", "é2"]
        );
    }

    proptest! {
        #[test]
        fn it_is_a_total_order(a in "[p0-9é-]{0,8}", b in "[p0-9é-]{0,8}", c in "[p0-9é-]{0,8}") {
            prop_assert_eq!(compare(&a, &b), compare(&b, &a).reverse());
            prop_assert_eq!(compare(&a, &b).is_eq(), a == b);
            if compare(&a, &b).is_le() && compare(&b, &c).is_le() {
                prop_assert!(compare(&a, &c).is_le());
            }
        }
    }
}
