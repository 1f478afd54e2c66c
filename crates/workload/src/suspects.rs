//! Prompts that have failed alike on two workers: the prompt is the likely cause. Each is then tried on
//! one worker only, and its failures count against none.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a prompt is remembered after its last failure.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Maximum number of prompts that are remembered.
const PROMPTS_MAX: usize = 1024;

/// The suspect prompts of one model, as keyed hashes.
#[derive(Debug, Default)]
pub struct Suspects {
    /// Whether there are any: otherwise no prompt is hashed.
    any: AtomicBool,
    key: RandomState,
    /// When each was last seen to fail.
    failed_at: Mutex<HashMap<u64, Instant>>,
}

impl Suspects {
    /// Remembers a prompt that has failed.
    pub fn add(&self, prompt: &str, now: Instant) {
        let hash = self.key.hash_one(prompt);
        let mut failed_at = self.lock();
        failed_at.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
        if failed_at.len() >= PROMPTS_MAX
            && let Some(oldest) = failed_at.iter().min_by_key(|(_, at)| **at).map(|(hash, _)| *hash)
        {
            failed_at.remove(&oldest);
        }
        failed_at.insert(hash, now);
        self.any.store(true, Relaxed);
    }

    /// Forgets a prompt that has succeeded.
    pub fn remove(&self, prompt: &str) {
        let mut failed_at = self.lock();
        failed_at.remove(&self.key.hash_one(prompt));
        self.any.store(!failed_at.is_empty(), Relaxed);
    }

    /// The number of these prompts.
    pub fn count(&self, now: Instant) -> usize {
        let recent = |at: &&Instant| now.saturating_duration_since(**at) < REMEMBERED;
        self.lock().values().filter(recent).count()
    }

    /// Whether a prompt is one of them.
    pub fn contains(&self, prompt: &str, now: Instant) -> bool {
        if !self.any.load(Relaxed) {
            return false;
        }
        let failed_at = self.lock().get(&self.key.hash_one(prompt)).copied();
        failed_at.is_some_and(|at| now.saturating_duration_since(at) < REMEMBERED)
    }

    /// A poisoned lock is still used: the map stays valid at each step of a change.
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Instant>> {
        self.failed_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_number_of_prompts_is_remembered_for_some_minutes() {
        let (suspects, start) = (Suspects::default(), Instant::now());
        assert!(!suspects.contains("a", start));
        suspects.add("a", start);
        assert_eq!((suspects.count(start), suspects.count(start + REMEMBERED)), (1, 0));
        assert!(suspects.contains("a", start + REMEMBERED / 2) && !suspects.contains("b", start));
        assert!(!suspects.contains("a", start + REMEMBERED));
        suspects.remove("a");
        assert!(!suspects.contains("a", start));
        for number in 0..PROMPTS_MAX as u32 {
            suspects.add(&number.to_string(), start + Duration::from_millis(1 + u64::from(number)));
        }
        assert!(!suspects.contains("a", start), "the oldest goes first");
        assert!(suspects.contains("0", start + Duration::from_secs(2)));
    }
}
