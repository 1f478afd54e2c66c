//! Which replicas of a record are present, and what those that are absent keep of a limit.

use std::collections::HashMap;

use super::holdings::{Holdings, Sighting, floor};
use super::kind::{LimitKind, PerLimit};
use super::record::{Entry, Record};
use super::window::DAY_MS;

/// Parts of a lease after which shares are renewed.
pub(super) const RENEWALS_PER_LEASE: u64 = 4;

/// The floors of replicas that are cut off or dead are together at most this part of a limit; those
/// that were present last keep theirs. Otherwise a few dozen replicas that die on one day would take
/// the limit from all others.
const FLOORS_DIVISOR: u64 = 4;

/// Maximum number of replicas without a share that stay in the record although they may be dead.
const ABSENT_MAX: usize = 64;

/// The replicas that are cut off or dead, numbered from the one that was present last.
pub(super) struct Absence(HashMap<String, usize>);

impl Absence {
    /// What a replica keeps of a limit while it is absent.
    pub(super) fn floor(&self, id: &str, limit: u64) -> u64 {
        let Some(number) = self.0.get(id) else { return 0 };
        let floor = floor(limit);
        let floors = floor.saturating_mul(*number as u64 + 1);
        if floors <= limit / FLOORS_DIVISOR { floor } else { 0 }
    }

    /// Whether a replica stays in the record without a share.
    fn is_kept(&self, id: &str) -> bool {
        self.0.get(id).is_none_or(|number| *number < ABSENT_MAX)
    }
}

impl Holdings {
    /// Notes which renewals of others are seen for the first time.
    pub(super) fn observe(&mut self, record: &Record, now_ms: u64) {
        self.sightings.retain(|id, _| record.replicas.contains_key(id));
        for (id, entry) in &record.replicas {
            let fresh = Sighting { renewal: entry.renewal, at_ms: now_ms };
            let seen = self.sightings.entry(id.clone()).or_insert(fresh);
            if seen.renewal != entry.renewal {
                *seen = fresh;
            }
        }
    }

    /// Milliseconds after a sighting until nothing that the replica used before the end of its lease
    /// is in a window of a minute.
    pub(super) fn expires_after_ms(&self, has_left: bool) -> u64 {
        let lease_ms = if has_left { 0 } else { self.terms.lease_ms };
        lease_ms + self.terms.window_ms + self.terms.margin_ms
    }

    /// Whether a replica takes part: it has not left, and its lease has not expired.
    pub(super) fn is_present(&self, id: &str, entry: &Entry, now_ms: u64) -> bool {
        let seen = self.sightings.get(id);
        !entry.has_left
            && seen.is_some_and(|seen| now_ms < seen.at_ms + self.expires_after_ms(false))
    }

    /// Whether a replica has missed a renewal. Nothing is set aside for such a replica.
    pub(super) fn is_silent(&self, id: &str, now_ms: u64) -> bool {
        let silent_ms = 2 * self.terms.lease_ms / RENEWALS_PER_LEASE;
        self.sightings.get(id).is_some_and(|seen| now_ms >= seen.at_ms + silent_ms)
    }

    /// Which replicas are cut off or dead.
    pub(super) fn absence(&self, record: &Record, now_ms: u64) -> Absence {
        let mut absent: Vec<(&String, u64)> = record
            .replicas
            .iter()
            .filter(|(id, entry)| !entry.has_left && !self.is_present(id, entry, now_ms))
            .map(|(id, entry)| (id, entry.renewed_ms))
            .collect();
        absent.sort_by_key(|(_, renewed_ms)| std::cmp::Reverse(*renewed_ms));
        let ids = absent.into_iter().map(|(id, _)| id.clone());
        Absence(ids.zip(0..).collect())
    }

    /// Lowers the shares of replicas that are gone, and removes replicas that are gone for a day.
    pub(super) fn expire(&self, record: &mut Record, absence: &Absence, now_ms: u64) {
        let margin_ms = self.terms.margin_ms;
        record.replicas.retain(|id, entry| {
            let Some(seen) = self.sightings.get(id) else { return true };
            let expires_after_ms = self.expires_after_ms(entry.has_left);
            if now_ms < seen.at_ms + expires_after_ms {
                return true;
            }
            let removed_after_ms = DAY_MS + expires_after_ms + 2 * margin_ms;
            if now_ms > entry.renewed_ms.saturating_add(removed_after_ms) {
                return false;
            }
            let lease_ms = if entry.has_left { 0 } else { self.terms.lease_ms };
            let last_day = (seen.at_ms + lease_ms + margin_ms) / DAY_MS;
            let is_next_day = now_ms.saturating_sub(margin_ms) / DAY_MS > last_day;
            let is_kept = !entry.has_left && absence.is_kept(id);
            let mut total = 0_u64;
            for kind in LimitKind::ALL {
                let Some(holding) = entry.holding_mut(kind) else { continue };
                if kind.column().is_some() || is_next_day {
                    holding.share = holding.share.min(absence.floor(id, holding.limit));
                    (holding.used, holding.need) = (holding.used.min(holding.share), 0);
                }
                total = total.saturating_add(holding.share);
            }
            is_kept || total > 0
        });
    }

    /// Gives the floor to each absent replica that keeps a floor and has less, as far as there is room,
    /// because the replica will use the floor later (`FLOOR_AFTER_LEASES`).
    pub(super) fn reserve_floors(
        &self,
        record: &mut Record,
        own: Option<&Entry>,
        limits: &PerLimit<Option<u64>>,
        absence: &Absence,
    ) {
        for (kind, limit) in limits.iter() {
            let (Some(limit), Some(_)) = (limit, kind.column()) else { continue };
            let share = |entry: &Entry| entry.holding(kind).map_or(0, |holding| holding.share);
            let (mut limit, mut total) = (*limit, own.map_or(0, share));
            for (id, entry) in &record.replicas {
                let Some(holding) = entry.holding(kind) else { continue };
                total = total.saturating_add(holding.share);
                if !entry.has_left && !absence.0.contains_key(id) {
                    limit = limit.min(holding.limit);
                }
            }
            let mut free = limit.saturating_sub(total);
            for (id, entry) in &mut record.replicas {
                let Some(holding) = entry.holding_mut(kind) else { continue };
                let least = absence.floor(id, holding.limit);
                let missing = least.saturating_sub(holding.share).min(free);
                holding.share += missing;
                free -= missing;
            }
        }
    }
}
