//! Series of one model or tenant that every request updates, looked up by their labels once.

use std::sync::OnceLock;

/// Maximum number of series that are kept; others are looked up each time.
const KEPT: usize = 12;

/// Series of one metric, by the labels in which they differ.
#[derive(Debug)]
pub struct Series<M, const N: usize> {
    kept: [OnceLock<([&'static str; N], M)>; KEPT],
}

impl<M, const N: usize> Default for Series<M, N> {
    fn default() -> Self {
        Self { kept: std::array::from_fn(|_| OnceLock::new()) }
    }
}

impl<M, const N: usize> Series<M, N> {
    /// Calls a function with the series of these labels.
    pub fn with<T>(
        &self,
        labels: [&'static str; N],
        find: impl Fn() -> M,
        act: impl FnOnce(&M) -> T,
    ) -> T {
        for place in &self.kept {
            let (kept, series) = place.get_or_init(|| (labels, find()));
            if *kept == labels {
                return act(series);
            }
        }
        act(&find())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_label_value_has_its_own_series() {
        const NAMES: [&str; 15] =
            ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"];
        let series = Series::<usize, 1>::default();
        for _ in 0..2 {
            for (at, name) in NAMES.iter().enumerate() {
                assert_eq!(series.with([name], || at, |found| *found), at);
            }
        }
    }
}
