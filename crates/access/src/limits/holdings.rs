//! The shares that this replica holds of a tenant's limits, and how it holds them.

use std::collections::HashMap;

use super::kind::{LimitKind, PerLimit};
use super::window::DAY_MS;

/// A replica without a lease admits this part of each limit, but at least 1.
const FLOOR_DIVISOR: u64 = 32;

/// How long a replica that has never reached the broker waits for its first share before it admits
/// the floor.
pub(crate) const FIRST_CONTACT_MS: u64 = 5000;

/// Interval in which demand is measured.
const DEMAND_INTERVAL_MS: u64 = 1000;

/// How long demand is kept.
const DEMAND_KEPT_MS: u64 = 3000;

/// A replica whose share is less than the floor when its lease ends may use the floor after so many
/// further leases and two windows. By then each replica with a lease has written the record three
/// times after it could see that this replica is cut off: it has given up what it does not use, has
/// seen a whole window pass, and has added the floor to the share of this replica.
const FLOOR_AFTER_LEASES: u64 = 4;

/// What a replica without a lease may use of a limit.
pub(crate) fn floor(limit: u64) -> u64 {
    (limit / FLOOR_DIVISOR).max(1)
}

/// Times of the protocol by which replicas share limits; equal on all replicas.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// How long a share is used without a renewal.
    pub(crate) lease_ms: u64,
    /// Length of the window of the limits per minute.
    pub(crate) window_ms: u64,
    /// Maximum difference between the clocks of two replicas.
    pub(crate) margin_ms: u64,
}

/// The shares of this replica, and what it knows about the others.
#[derive(Clone, Debug)]
pub(crate) struct Holdings {
    pub(crate) terms: Terms,
    pub(crate) shares: PerLimit<Share>,
    /// When the lease of the shares ends; 0 before the first share.
    pub(crate) lease_until_ms: u64,
    /// The number of the last write that was acknowledged, and of the last one that was tried.
    pub(crate) renewal: u64,
    pub(crate) tried: u64,
    pub(crate) renewed_ms: u64,
    /// When each other replica's renewal was first seen.
    pub(crate) sightings: HashMap<String, Sighting>,
    /// Since when the record has been closed.
    pub(crate) closed_since_ms: Option<u64>,
    /// Before this time, this replica takes nothing, since the record may lack shares.
    pub(crate) takes_from_ms: u64,
    /// Whether, by the last record that was read, a replica has less than it needs, or the shares are
    /// more than the limit together.
    pub(crate) is_contended: bool,
    /// Whether the replica has given its shares back for good.
    pub(crate) has_left: bool,
    /// Tokens of the largest request so far.
    pub(crate) largest_tokens: u64,
}

/// A renewal of another replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sighting {
    pub(crate) renewal: u64,
    pub(crate) at_ms: u64,
}

/// This replica's share of a limit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Share {
    /// Maximum that may be used in any window while the lease lasts.
    pub(crate) amount: u64,
    /// Whether the record has had the share since the limit exists.
    pub(crate) is_held: bool,
    /// Since when the limit exists here.
    since_ms: u64,
    /// The need in the record, with the limit to which it belongs.
    pub(crate) written: Option<(u64, u64)>,
    /// What all others had used according to the record that was last read.
    pub(crate) others_used: u64,
    /// Cost of the requests that were admitted and refused since demand was last measured.
    admitted: u64,
    refused: u64,
    demand: u64,
    demand_until_ms: u64,
    measured_ms: u64,
}

impl Holdings {
    pub(crate) fn new(terms: Terms, now_ms: u64) -> Self {
        let share = Share { since_ms: now_ms, ..Share::default() };
        Self {
            terms,
            shares: PerLimit::from_fn(|_| share.clone()),
            lease_until_ms: 0,
            renewal: 0,
            tried: 0,
            renewed_ms: 0,
            sightings: HashMap::new(),
            closed_since_ms: None,
            takes_from_ms: 0,
            is_contended: false,
            has_left: false,
            largest_tokens: 0,
        }
    }

    /// Whether the shares may be used in full.
    pub(crate) fn is_leased(&self, now_ms: u64) -> bool {
        now_ms < self.lease_until_ms
    }

    /// What may be used of a limit.
    pub(crate) fn usable(&self, kind: LimitKind, limit: u64, now_ms: u64) -> u64 {
        let share = &self.shares[kind];
        if self.has_left {
            0
        } else if !share.is_held {
            let is_first = now_ms < share.since_ms.saturating_add(FIRST_CONTACT_MS);
            if is_first { 0 } else { floor(limit) }
        } else if self.is_leased(now_ms) {
            share.amount
        } else {
            // Others know the limit as it was last written.
            let written = share.written.map_or(limit, |(written, _)| written.min(limit));
            self.usable_without_lease(kind, share.amount, floor(written), now_ms)
        }
    }

    fn usable_without_lease(&self, kind: LimitKind, amount: u64, floor: u64, now_ms: u64) -> u64 {
        let Terms { lease_ms, window_ms, margin_ms } = self.terms;
        if kind.column().is_none() {
            // Nobody else gets the share of a day before the day has ended.
            let is_same_day = now_ms / DAY_MS <= self.lease_until_ms / DAY_MS;
            return if is_same_day { amount } else { amount.min(floor) };
        }
        let wait_ms = FLOOR_AFTER_LEASES * lease_ms + 2 * (window_ms + margin_ms);
        let is_reserved = now_ms >= self.lease_until_ms + wait_ms;
        if is_reserved { floor } else { amount.min(floor) }
    }

    /// What the others had used, as far as it is known.
    pub(crate) fn others_used(&self, kind: LimitKind) -> u64 {
        self.shares[kind].others_used
    }

    /// Notes a request as demand.
    pub(crate) fn note(&mut self, tokens: u64, is_admitted: bool) {
        self.largest_tokens = self.largest_tokens.max(tokens);
        for kind in LimitKind::ALL {
            let share = &mut self.shares[kind];
            let sum = if is_admitted { &mut share.admitted } else { &mut share.refused };
            *sum = sum.saturating_add(kind.cost(tokens));
        }
    }

    /// Adapts to a limit that has changed. A limit that is new here has no share yet.
    pub(crate) fn change(
        &mut self,
        kind: LimitKind,
        before: Option<u64>,
        limit: Option<u64>,
        now_ms: u64,
    ) {
        let share = &mut self.shares[kind];
        match (before, limit) {
            // The same part of a lower limit, since the sum of all shares is at most the limit.
            (Some(before), Some(limit)) if limit < before => {
                let part = u128::from(share.amount) * u128::from(limit) / u128::from(before.max(1));
                share.amount = u64::try_from(part).unwrap_or(limit).min(limit);
            }
            (Some(_), Some(_)) => {}
            _ => *share = Share { since_ms: now_ms, ..Share::default() },
        }
    }
}

impl Share {
    /// What requests may need in the next seconds beyond what is used: what was refused, or twice
    /// what was admitted in the last second. Kept for a few seconds, in which shares can move.
    pub(crate) fn demand(&mut self, now_ms: u64) -> u64 {
        let fresh = self.admitted.saturating_mul(2).max(self.refused);
        if fresh >= self.demand {
            (self.demand, self.demand_until_ms) = (fresh, now_ms.saturating_add(DEMAND_KEPT_MS));
        }
        if now_ms >= self.measured_ms.saturating_add(DEMAND_INTERVAL_MS) {
            if now_ms >= self.demand_until_ms {
                self.demand = fresh;
            }
            (self.admitted, self.refused, self.measured_ms) = (0, 0, now_ms);
        }
        self.demand
    }
}
