//! How a replica changes the record of shares: from the record that was read to the one that is to
//! be written, by compare-and-set.
//!
//! What keeps the sum of all use within the limit:
//! - The sum of the shares in the record is at most the limit, and a replica uses at most its share.
//! - After a limit was lowered, the shares may be more than the limit together, because no share is
//!   less than what was used. Until that is in no window any more, a replica uses only what the shares
//!   of the others leave of the limit.
//! - A replica lowers its share before it writes the record, never below what it has used in the
//!   current window, and raises it only after the write was acknowledged.
//! - A replica that cannot write lowers its share to the floor at the end of its lease. Others take
//!   the rest when the lease and one more window have passed since they saw the last renewal, so that
//!   what was used before the end of the lease is in no window any more. For days, the window ends
//!   with the day.

use super::account::Account;
use super::fair;
use super::holdings::{Holdings, floor};
use super::kind::{LimitKind, PerLimit};
use super::presence::{Absence, RENEWALS_PER_LEASE};
use super::record::{Entry, Holding, REPLICAS_MAX, Record};

/// How long a record stays closed after it was created or had lost a share.
pub(crate) const CLOSED_MS: u64 = 2000;

/// Smallest part of a limit that is moved while no replica lacks anything.
const STEP_DIVISOR: u64 = 32;

/// Bounds of the part of a day's limit that a replica holds without a need. The share of a replica
/// that fails is lost until the end of the day.
const DAY_SPARE_MIN_DIVISOR: u64 = 64;
const DAY_SPARE_MAX_DIVISOR: u64 = 16;

/// A record to write, and the shares that this replica has once it is written.
#[derive(Debug)]
pub(crate) struct Proposal {
    pub(crate) record: Record,
    shares: PerLimit<Option<Holding>>,
    /// What this replica may use of its shares.
    usable: PerLimit<u64>,
    renewal: u64,
    planned_ms: u64,
    /// Whether the record lacked the shares of this replica.
    is_lost: bool,
}

/// Why a record is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To hold shares.
    Hold,
    /// To give everything back that is not used, for good.
    Leave,
}

/// How much a replica may take of what no share contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakeLimit {
    All,
    /// The floor, while other replicas may add shares that the record lacks.
    Floor,
    /// Nothing, because the record lacked a share of this replica, and perhaps lacks others.
    Nothing,
}

/// What one plan is about.
struct Round<'r> {
    /// The id of this replica.
    me: &'r str,
    /// The entries of all others.
    record: &'r Record,
    now_ms: u64,
    taking: TakeLimit,
    purpose: Purpose,
    absence: &'r Absence,
}

/// The shares of a limit, from the point of view of one replica.
struct Division {
    /// The lowest limit in the configurations of all replicas that are present.
    limit: u64,
    /// The share of this replica that the record has.
    base: u64,
    /// The sum of the shares of all others.
    others: u64,
    /// What the others had used.
    others_used: u64,
    /// What this replica should have.
    target: u64,
    /// Whether a replica that is present has less than it needs, or the shares are more than the
    /// limit together.
    is_contended: bool,
}

impl Division {
    /// What the shares of the others leave of the limit.
    fn room(&self) -> u64 {
        self.limit.saturating_sub(self.others)
    }
}

impl Account {
    /// What is to be written after `record` was read; `None` if nothing is. Gives up at once what the
    /// proposal gives up. `me` is the id of this replica.
    pub(crate) fn plan(
        &mut self,
        me: &str,
        record: Option<Record>,
        purpose: Purpose,
        now_ms: u64,
    ) -> Option<Proposal> {
        let now_ms = self.advance(now_ms);
        let mut record = record.unwrap_or_default();
        let own = record.replicas.remove(me);
        let holdings = self.holdings.as_mut()?;
        let is_limited = self.limits.iter().any(|(_, limit)| limit.is_some());
        let is_full = own.is_none() && record.replicas.len() >= REPLICAS_MAX;
        let is_absent = !is_limited && own.is_none();
        if is_full || is_absent || (holdings.has_left && purpose == Purpose::Hold) {
            return None;
        }
        holdings.observe(&record, now_ms);
        let absence = holdings.absence(&record, now_ms);
        holdings.expire(&mut record, &absence, now_ms);
        let is_lost = holdings.is_lost(own.as_ref());
        let was_open = record.is_open;
        let taking = holdings.taking(&mut record, is_lost, now_ms);
        let mut is_due = purpose == Purpose::Leave
            || own.is_none()
            || is_lost
            || record.is_open != was_open
            || holdings.is_renewal_due(now_ms);
        let own = own.filter(|_| !is_lost);
        if taking == TakeLimit::All {
            holdings.reserve_floors(&mut record, own.as_ref(), &self.limits, &absence);
        }
        let round = Round { me, record: &record, now_ms, taking, purpose, absence: &absence };
        let mut is_contended = false;
        let mut usable = PerLimit::default();
        let shares = PerLimit::from_fn(|kind| {
            let limit = self.limits[kind]?;
            let held = own.as_ref().and_then(|own| own.holding(kind));
            let need = self.need(kind, limit, now_ms);
            let division = self.divide(&round, kind, limit, held, need);
            is_contended |= division.is_contended;
            let holding = self.new_holding(&round, kind, limit, need, &division);
            is_due |= is_material(held, &holding, division.is_contended);
            usable[kind] = holding.share.min(division.room());
            if let Some(holdings) = &mut self.holdings {
                let share = &mut holdings.shares[kind];
                share.others_used = division.others_used;
                is_due |= share.amount < need.min(usable[kind]);
            }
            Some(holding)
        });
        let holdings = self.holdings.as_mut()?;
        holdings.is_contended = is_contended;
        if !is_due {
            return None;
        }
        holdings.give_up(&usable, purpose);
        let before = holdings.tried.max(own.map_or(0, |own| own.renewal));
        holdings.tried = before.saturating_add(1);
        let mut entry = Entry::new(holdings.tried, now_ms, &shares);
        entry.has_left = purpose == Purpose::Leave;
        record.replicas.insert(me.to_owned(), entry);
        let renewal = holdings.tried;
        Some(Proposal { record, shares, usable, renewal, planned_ms: now_ms, is_lost })
    }

    /// The record was written as proposed.
    pub(crate) fn confirm(&mut self, proposal: &Proposal) {
        let limits = &self.limits;
        let Some(holdings) = &mut self.holdings else { return };
        for (kind, holding) in proposal.shares.iter() {
            let share = &mut holdings.shares[kind];
            if let (Some(holding), Some(limit)) = (holding, limits[kind]) {
                let usable = proposal.usable[kind];
                // A limit that has changed meanwhile needs another plan.
                share.amount = match holding.limit == limit {
                    true => usable,
                    false => share.amount.min(usable),
                };
                share.is_held = true;
                share.written = Some((holding.limit, holding.need));
            }
        }
        holdings.renewal = proposal.renewal;
        holdings.renewed_ms = proposal.planned_ms;
        // From before the write, because others can see the renewal from then on.
        holdings.lease_until_ms = proposal.planned_ms + holdings.terms.lease_ms;
        if proposal.is_lost {
            // Only now is it certain that the record was not an old one.
            holdings.closed_since_ms = Some(proposal.planned_ms);
            holdings.takes_from_ms = proposal.planned_ms + holdings.expires_after_ms(false);
        }
    }

    /// Whether the record should be read, and perhaps written.
    pub(crate) fn is_due(&mut self, now_ms: u64) -> bool {
        let now_ms = self.advance(now_ms);
        let Some(holdings) = &self.holdings else { return false };
        let is_limited = self.limits.iter().any(|(_, limit)| limit.is_some());
        if holdings.has_left || !(is_limited || holdings.renewal > 0) {
            return false;
        }
        let closed_until = holdings.closed_since_ms.map(|since| since + CLOSED_MS);
        if holdings.is_renewal_due(now_ms) || closed_until.is_some_and(|until| until <= now_ms) {
            return true;
        }
        let is_contended = holdings.is_contended;
        LimitKind::ALL.into_iter().any(|kind| {
            let Some(limit) = self.limits[kind] else { return false };
            let need = self.need(kind, limit, now_ms);
            let Some(holdings) = &self.holdings else { return false };
            let share = &holdings.shares[kind];
            let Some((of, written)) = share.written.filter(|_| share.is_held) else { return true };
            of != limit
                || need > share.amount
                || need.abs_diff(written) >= step(limit, is_contended)
        })
    }

    /// What this replica needs of a limit.
    fn need(&mut self, kind: LimitKind, limit: u64, now_ms: u64) -> u64 {
        let used = self.used(kind);
        let demand = self.holdings.as_mut().map_or(0, |own| own.shares[kind].demand(now_ms));
        used.saturating_add(demand).min(limit)
    }

    /// Adds up who has what, and computes what this replica should have.
    fn divide(
        &self,
        round: &Round<'_>,
        kind: LimitKind,
        own_limit: u64,
        held: Option<&Holding>,
        need: u64,
    ) -> Division {
        let Round { me, record, now_ms, .. } = *round;
        let base = match (held, &self.holdings) {
            (Some(held), _) => held.share,
            // A share that the record has lost.
            (None, Some(own)) if own.shares[kind].is_held => own.usable(kind, own_limit, now_ms),
            _ => 0,
        };
        let (mut limit, mut others, mut others_used, mut pinned) = (own_limit, 0_u64, 0_u64, 0_u64);
        let (mut needs, mut before) = (Vec::with_capacity(record.replicas.len() + 1), 0);
        let mut is_contended = need > base;
        for (id, entry) in &record.replicas {
            let Some(holding) = entry.holding(kind) else { continue };
            others = others.saturating_add(holding.share);
            others_used = others_used.saturating_add(holding.used.min(holding.share));
            let is_present =
                self.holdings.as_ref().is_some_and(|own| own.is_present(id, entry, now_ms));
            if is_present {
                limit = limit.min(holding.limit);
                before += usize::from(id.as_str() < me);
                let is_silent = self.holdings.as_ref().is_some_and(|own| own.is_silent(id, now_ms));
                let need = if is_silent { holding.need.min(holding.share) } else { holding.need };
                needs.push(need);
                is_contended |= need > holding.share;
            } else {
                let least = match kind.column() {
                    Some(_) => round.absence.floor(id, holding.limit),
                    None => 0,
                };
                pinned = pinned.saturating_add(holding.share.max(least));
            }
        }
        needs.insert(before, need);
        is_contended |= others.saturating_add(base) > limit;
        let spare_max = match kind {
            LimitKind::TokensPerDay => self.day_spare(limit),
            LimitKind::Requests | LimitKind::TokensPerMinute => u64::MAX,
        };
        let target = fair::target(&needs, before, limit.saturating_sub(pinned), spare_max);
        Division { limit, base, others, others_used, target, is_contended }
    }

    /// What a replica holds of a day's limit without a need: room for two of its largest requests.
    fn day_spare(&self, limit: u64) -> u64 {
        let largest = self.holdings.as_ref().map_or(0, |own| own.largest_tokens);
        let (least, most) = (limit / DAY_SPARE_MIN_DIVISOR, limit / DAY_SPARE_MAX_DIVISOR);
        largest.saturating_mul(2).clamp(least, most).max(1)
    }

    /// The share that this replica should write.
    fn new_holding(
        &self,
        round: &Round<'_>,
        kind: LimitKind,
        limit: u64,
        need: u64,
        division: &Division,
    ) -> Holding {
        let margin_ms = self.holdings.as_ref().map_or(0, |own| own.terms.margin_ms);
        let (base, target) = (division.base, division.target);
        let at_least = self.used_within(kind, margin_ms);
        let room = division.room();
        let wanted = match (round.purpose, round.taking) {
            (Purpose::Leave, _) => 0,
            (Purpose::Hold, TakeLimit::All) => target,
            (Purpose::Hold, TakeLimit::Floor) => target.min(base.max(floor(limit))),
            (Purpose::Hold, TakeLimit::Nothing) => target.min(base),
        };
        // There is less room than the base if the limit has become lower.
        let share = wanted.min(room).max(at_least.min(base));
        Holding { limit, share, used: self.used(kind), need }
    }
}

impl Holdings {
    /// Whether the record lacks a share that it had: the broker has lost the record or its last
    /// changes.
    fn is_lost(&self, own: Option<&Entry>) -> bool {
        self.renewal > 0 && own.is_none_or(|own| own.renewal < self.renewal)
    }

    /// Closes a record that lacks shares, opens one that has been closed for long enough, and returns
    /// how much this replica may take.
    fn taking(&mut self, record: &mut Record, is_lost: bool, now_ms: u64) -> TakeLimit {
        if is_lost {
            record.is_open = false;
            return TakeLimit::Nothing;
        }
        if record.is_open {
            self.closed_since_ms = None;
        } else if *self.closed_since_ms.get_or_insert(now_ms) + CLOSED_MS <= now_ms {
            record.is_open = true;
        }
        match record.is_open {
            _ if now_ms < self.takes_from_ms => TakeLimit::Nothing,
            true => TakeLimit::All,
            false => TakeLimit::Floor,
        }
    }

    /// Whether the shares should be renewed.
    fn is_renewal_due(&self, now_ms: u64) -> bool {
        now_ms >= self.renewed_ms + self.terms.lease_ms / RENEWALS_PER_LEASE
    }

    /// Lowers shares before others can read that they are lower.
    fn give_up(&mut self, usable: &PerLimit<u64>, purpose: Purpose) {
        for (kind, usable) in usable.iter() {
            let share = &mut self.shares[kind];
            share.amount = share.amount.min(*usable);
        }
        self.has_left = purpose == Purpose::Leave;
    }
}

/// Whether a share has changed so much that the record should be written.
fn is_material(before: Option<&Holding>, after: &Holding, is_contended: bool) -> bool {
    let Some(before) = before else { return true };
    let step = step(after.limit, is_contended);
    before.limit != after.limit
        || before.share.abs_diff(after.share) >= step
        || before.need.abs_diff(after.need) >= step
}

/// The smallest change that matters: any while a replica has less than it needs.
fn step(limit: u64, is_contended: bool) -> u64 {
    if is_contended { 1 } else { (limit / STEP_DIVISOR).max(1) }
}
