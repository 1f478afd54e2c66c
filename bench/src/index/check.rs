//! Compares the results of all three indexes with those of an exact model.

use std::io;

use super::plan::Chain;
use super::report::NAMES;
use super::run::Run;
use super::subject::Subject;

/// Approximate number of queries that are compared.
const SAMPLES: usize = 400;

/// Numbers of wrong results of one index.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wrong {
    /// Queries that were compared.
    pub queries: usize,
    /// Queries with at least one wrong overlap.
    pub wrong_queries: usize,
    /// Overlaps that are too long.
    pub over: usize,
    /// Overlaps that are too short or missing.
    pub under: usize,
}

/// Compares a sample of an index's results with the right ones.
pub fn compare(
    subject: &dyn Subject,
    chains: &[Chain],
    right: impl Fn(&Chain) -> Vec<(u32, u32)>,
) -> Wrong {
    let mut wrong = Wrong::default();
    for query in (0..chains.len()).step_by((chains.len() / SAMPLES).max(1)) {
        wrong.queries += 1;
        let (found, right) = (subject.scores(query), right(&chains[query]));
        if found == right {
            continue;
        }
        wrong.wrong_queries += 1;
        let score = |scores: &[(u32, u32)], worker: u32| {
            scores.binary_search_by_key(&worker, |s| s.0).map_or(0, |at| scores[at].1)
        };
        let over = |(worker, blocks): &(u32, u32)| *blocks > score(&right, *worker);
        let under = |(worker, blocks): &(u32, u32)| *blocks > score(&found, *worker);
        wrong.over += found.iter().filter(|s| over(s)).count();
        wrong.under += right.iter().filter(|s| under(s)).count();
    }
    wrong
}

/// Compares all indexes, prints which of them are wrong, and marks them in the workload's next
/// rows.
///
/// # Errors
/// Standard output is closed.
pub fn check(
    run: &mut Run,
    workload: &str,
    subjects: &[Box<dyn Subject>; 3],
    chains: &[Chain],
    right: impl Fn(&Chain) -> Vec<(u32, u32)>,
) -> io::Result<()> {
    for (at, (name, subject)) in NAMES.iter().zip(subjects).enumerate() {
        let wrong = compare(subject.as_ref(), chains, &right);
        run.wrong[at] = wrong.wrong_queries > 0;
        if run.wrong[at] {
            run.print_comment(&format!("{workload}: {name} is WRONG: {wrong:?}"))?;
        }
    }
    Ok(())
}
