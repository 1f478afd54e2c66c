//! Correctness: every workload compares all three indexes with the exact model before it is
//! measured.

use std::io;

use super::plan::Chain;
use super::report::NAMES;
use super::run::Run;
use super::subject::Subject;

/// How many queries are compared.
const SAMPLES: usize = 400;

/// Queries with a wrong overlap, and overlaps that are wrong, of one subject.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wrong {
    /// Queries compared.
    pub queries: usize,
    /// Of these, with any wrong overlap.
    pub wrong_queries: usize,
    /// Overlaps that were too long.
    pub over: usize,
    /// Overlaps that were too short, or missing.
    pub under: usize,
}

/// Compares a sample of a subject's answers with the right ones.
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

/// Compares all subjects, says which are wrong, and marks the rows that follow.
///
/// # Errors
/// Where standard output is closed.
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
            run.say(&format!("{workload}: {name} is WRONG: {wrong:?}"))?;
        }
    }
    Ok(())
}
