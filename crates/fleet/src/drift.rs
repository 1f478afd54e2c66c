//! Reacts to drift: a lasting difference between the index and what a worker reports.
//!
//! Every reply's `cached_tokens` is compared with the estimate of the index (`audit`). A
//! worker that keeps finding less than estimated attracts prompts to blocks that it does not hold:
//! its overlap counts for less, its events are read again, and if that does not help it
//! takes no part in KV routing. For a worker that finds more, events are only read again: the index
//! claims nothing wrong about it, and cache tiers without events look the same.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

mod policy;

pub use policy::{Direction, DriftDecision, DriftReaction, Measurements, PastReactions, decide};

use splitrail_config::model::DriftConfig;

/// The reaction to one worker's drift so far.
#[derive(Debug, Default)]
pub struct Drift {
    past: Mutex<PastReactions>,
    /// The bits of an `f64`: the share of the worker's overlap that is ignored.
    discount: AtomicU64,
    given_up: AtomicBool,
}

/// The state of `Drift` as shown on the admin listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DriftView {
    /// Resynchronisations in a row that did not help while the worker found less than estimated.
    pub over_resyncs: u32,
    /// Resynchronisations in a row that did not help while the worker found more than estimated.
    pub under_resyncs: u32,
    /// Whether the worker is excluded from KV routing until it comes back.
    pub given_up: bool,
}

impl Drift {
    /// The share of the worker's overlap that is ignored, from 0 to 1.
    pub fn discount(&self) -> f64 {
        f64::from_bits(self.discount.load(Relaxed))
    }

    /// Whether the worker is excluded from KV routing until it comes back.
    pub fn has_given_up(&self) -> bool {
        self.given_up.load(Relaxed)
    }

    /// Resets the discount, because the worker's part of the index is being rebuilt.
    pub fn index_begins_anew(&self) {
        self.set_discount(0.0);
    }

    /// Resets everything, because the worker may have been restarted.
    pub fn forget(&self) {
        *self.past.lock().unwrap_or_else(PoisonError::into_inner) = PastReactions::default();
        self.given_up.store(false, Relaxed);
        self.set_discount(0.0);
    }

    /// The state as shown on the admin listener.
    pub fn view(&self) -> DriftView {
        let past = *self.past.lock().unwrap_or_else(PoisonError::into_inner);
        DriftView {
            over_resyncs: past.over_resyncs,
            under_resyncs: past.under_resyncs,
            given_up: self.has_given_up(),
        }
    }

    /// Decides how to react to the measurements, and records the decision.
    pub(super) fn decide(
        &self,
        config: &DriftConfig,
        measured: &Measurements,
        now: Instant,
    ) -> DriftDecision {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let decision = decide(config, measured, &past, now);
        past.note(&decision.reaction, now);
        self.set_discount(decision.discount);
        if decision.reaction == DriftReaction::Exclude {
            self.given_up.store(true, Relaxed);
        }
        decision
    }

    fn set_discount(&self, discount: f64) {
        self.discount.store(discount.to_bits(), Relaxed);
    }
}
