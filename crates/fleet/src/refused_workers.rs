//! The workers that discovery sources have found and that cannot be added.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::membership::ClaimError;

/// The workers of a model that its discovery sources have found and that cannot be added.
#[derive(Debug, Default)]
pub struct RefusedWorkers(Mutex<BTreeMap<String, RefusedOfSource>>);

/// Those of one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedOfSource {
    /// The name of the source.
    pub source: String,
    /// The number of workers.
    pub workers: usize,
    /// Why the first of them cannot be added.
    pub why: String,
}

impl RefusedWorkers {
    /// Replaces those of a source, by its last list.
    pub(super) fn set(&self, source: &str, refused: &[ClaimError]) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.first() {
            Some(first) => {
                let (workers, why) = (refused.len(), first.to_string());
                let refused = RefusedOfSource { source: source.to_owned(), workers, why };
                all.insert(source.to_owned(), refused);
            }
            None => {
                all.remove(source);
            }
        }
    }

    /// Those of each source, in the order of the sources' names.
    pub fn all(&self) -> Vec<RefusedOfSource> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}
