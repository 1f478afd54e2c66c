//! Replicas with a record that is changed by compare-and-set, in virtual time.

use std::sync::Arc;

use splitrail_config::TenantLimits;
use tokio::sync::Notify;

use crate::limits::holdings::Terms;
use crate::limits::plan::{Proposal, Purpose};
use crate::limits::record::Record;
use crate::limits::window::DAY_MS;
use crate::limits::{LimitKind, Limits, Reservation};

pub(super) const TERMS: Terms = Terms { lease_ms: 20_000, window_ms: 60_000, margin_ms: 4_000 };
pub(super) const START: u64 = DAY_MS * 20_000 - 300_000;

/// A request that was admitted.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) at_ms: u64,
    /// The day by the clock of the replica.
    pub(super) day: u64,
    pub(super) replica: String,
    /// As far as is known: reserved, or settled.
    pub(super) tokens: u64,
    /// Limits for which the replica had no share yet.
    pub(super) without_share: Vec<LimitKind>,
}

/// A write that is on its way to the broker.
struct Write {
    proposal: Proposal,
    revision: u64,
}

/// A router.
pub(super) struct Replica {
    pub(super) id: String,
    pub(super) limits: Arc<Limits>,
    pub(super) configured: TenantLimits,
    /// Difference of its clock from the true time.
    skew_ms: i64,
    pub(super) is_cut: bool,
    write: Option<Write>,
    /// The revision of the record that was last read or written.
    seen: Option<u64>,
    pub(super) open: Vec<(Reservation, usize)>,
}

/// Replicas, the broker's store, and all that was admitted.
pub(super) struct Cluster {
    pub(super) now_ms: u64,
    pub(super) replicas: Vec<Replica>,
    pub(super) store: Option<Record>,
    revision: u64,
    pub(super) admitted: Vec<Admitted>,
    /// Limits that were configured, with the time until which they count.
    pub(super) configured: Vec<(TenantLimits, u64)>,
    started: usize,
}

pub(super) fn tenant(requests: u64, minute: u64, day: u64) -> TenantLimits {
    TenantLimits {
        requests_per_minute: Some(requests),
        tokens_per_minute: Some(minute),
        tokens_per_day: Some(day),
        requests_in_flight: None,
    }
}

pub(super) fn value(limits: &TenantLimits, kind: LimitKind) -> u64 {
    let value = match kind {
        LimitKind::Requests => limits.requests_per_minute,
        LimitKind::TokensPerMinute => limits.tokens_per_minute,
        LimitKind::TokensPerDay => limits.tokens_per_day,
    };
    value.unwrap_or(u64::MAX)
}

impl Cluster {
    /// Replicas with these differences of their clocks.
    pub(super) fn start(limits: TenantLimits, skews_ms: &[i64]) -> Self {
        let mut cluster = Self {
            now_ms: START,
            replicas: Vec::new(),
            store: None,
            revision: 0,
            admitted: Vec::new(),
            configured: vec![(limits, u64::MAX)],
            started: 0,
        };
        for skew_ms in skews_ms {
            let replica = cluster.replica(limits, *skew_ms);
            cluster.replicas.push(replica);
        }
        cluster
    }

    fn replica(&mut self, configured: TenantLimits, skew_ms: i64) -> Replica {
        self.started += 1;
        let now_ms = self.now_ms.saturating_add_signed(skew_ms);
        Replica {
            id: format!("r{}", self.started),
            limits: Limits::shared(&configured, TERMS, Arc::new(Notify::new()), now_ms),
            configured,
            skew_ms,
            is_cut: false,
            write: None,
            seen: None,
            open: Vec::new(),
        }
    }

    /// The time of a replica.
    pub(super) fn time(&self, replica: usize) -> u64 {
        self.now_ms.saturating_add_signed(self.replicas[replica].skew_ms)
    }

    /// A request; returns whether it was admitted.
    pub(super) fn reserve(&mut self, replica: usize, tokens: u64) -> bool {
        let time = self.time(replica);
        let at = &mut self.replicas[replica];
        let without_share = {
            let account = at.limits.account();
            let holdings = account.holdings.as_ref().unwrap();
            let kinds = LimitKind::ALL.into_iter();
            kinds.filter(|kind| !holdings.shares[*kind].is_held).collect()
        };
        let Ok(reservation) = at.limits.reserve(time, tokens) else { return false };
        at.open.push((reservation, self.admitted.len()));
        self.admitted.push(Admitted {
            at_ms: self.now_ms,
            day: time / DAY_MS,
            replica: at.id.clone(),
            tokens,
            without_share,
        });
        true
    }

    pub(super) fn settle(&mut self, replica: usize, which: usize, percent: u64) {
        let open = &mut self.replicas[replica].open;
        if open.is_empty() {
            return;
        }
        let (reservation, index) = open.swap_remove(which % open.len());
        let actual = self.admitted[index].tokens * percent / 100;
        reservation.settle(actual);
        self.admitted[index].tokens = actual;
    }

    pub(super) fn cancel(&mut self, replica: usize, which: usize) {
        let open = &mut self.replicas[replica].open;
        if !open.is_empty() {
            let (reservation, index) = open.swap_remove(which % open.len());
            drop(reservation);
            self.admitted[index].tokens = 0;
        }
    }

    /// A replica reads the record, and begins to write it.
    pub(super) fn read(&mut self, replica: usize, purpose: Purpose) {
        let time = self.time(replica);
        let at = &mut self.replicas[replica];
        if at.is_cut || at.write.is_some() {
            return;
        }
        at.seen = Some(self.revision);
        // As the store would return it.
        let record = self.store.as_ref().map(|record| Record::decode(&record.encode()).unwrap());
        let planned = at.limits.account().plan(&at.id, record, purpose, time);
        at.write = planned.map(|proposal| Write { proposal, revision: self.revision });
    }

    /// A write arrives at the broker, if the revision is right, and perhaps the acknowledgement
    /// arrives at the replica.
    pub(super) fn arrive(&mut self, replica: usize, is_acknowledged: bool) {
        let at = &mut self.replicas[replica];
        let Some(write) = at.write.take() else { return };
        if write.revision != self.revision {
            return;
        }
        self.revision += 1;
        self.store = Some(write.proposal.record.clone());
        if is_acknowledged && !at.is_cut {
            at.limits.account().confirm(&write.proposal);
        }
    }

    /// A write is lost on its way.
    pub(super) fn lose_write(&mut self, replica: usize) {
        self.replicas[replica].write = None;
    }

    /// All replicas read and write the record once, if they have a reason.
    pub(super) fn pass(&mut self) {
        for replica in 0..self.replicas.len() {
            let time = self.time(replica);
            let at = &self.replicas[replica];
            if at.limits.account().is_due(time) || at.seen != Some(self.revision) {
                self.read(replica, Purpose::Hold);
                self.arrive(replica, true);
            }
        }
    }

    /// Time passes, with a pass each second.
    pub(super) fn run(&mut self, ms: u64) {
        let until = self.now_ms + ms;
        while self.now_ms < until {
            self.now_ms = until.min(self.now_ms + 1000);
            self.pass();
        }
    }

    /// The broker forgets all records.
    pub(super) fn lose_store(&mut self) {
        self.store = None;
        self.revision += 1;
    }

    /// A replica dies, and another one starts in its place.
    pub(super) fn restart(&mut self, replica: usize) {
        let (configured, skew_ms) =
            (self.replicas[replica].configured, self.replicas[replica].skew_ms);
        let fresh = self.replica(configured, skew_ms);
        let dead = std::mem::replace(&mut self.replicas[replica], fresh);
        // What the dead replica has admitted is not refunded.
        self.replicas[replica].is_cut = dead.is_cut;
    }

    /// A replica is told another limit.
    pub(super) fn change(&mut self, replica: usize, limits: TenantLimits) {
        let time = self.time(replica);
        self.replicas[replica].limits.change(&limits, 1.0, time);
        self.replicas[replica].configured = limits;
        self.configured.push((limits, u64::MAX));
        let now_ms = self.now_ms;
        for (limits, until) in &mut self.configured {
            let is_used = self.replicas.iter().any(|replica| replica.configured == *limits);
            if !is_used && *until == u64::MAX {
                *until = now_ms;
            }
        }
    }

    /// What a replica counts as used today, and the tokens of its requests of the day.
    pub(super) fn day_of(&self, replica: usize) -> (u64, u64) {
        let (time, at) = (self.time(replica), &self.replicas[replica]);
        let mut account = at.limits.account();
        account.advance(time);
        let used = account.used(LimitKind::TokensPerDay);
        let own = self.admitted.iter().filter(|one| one.replica == at.id);
        (used, own.filter(|one| one.day == time / DAY_MS).map(|one| one.tokens).sum())
    }

    /// What was admitted in the last minute, or today by the clock of a replica.
    pub(super) fn used(
        &self,
        kind: LimitKind,
        by: usize,
        mut is_meant: impl FnMut(&Admitted) -> bool,
    ) -> u64 {
        let day = self.time(by) / DAY_MS;
        let counted = self.admitted.iter().filter(|one| match kind {
            LimitKind::TokensPerDay => one.day == day,
            _ => one.at_ms + TERMS.window_ms > self.now_ms,
        });
        let cost = |one: &Admitted| if kind == LimitKind::Requests { 1 } else { one.tokens };
        counted.filter(|one| is_meant(one)).map(cost).sum()
    }

    /// The highest limit that was configured anywhere in the last minute, or today.
    pub(super) fn limit(&self, kind: LimitKind) -> u64 {
        let since = match kind {
            LimitKind::TokensPerDay => (self.now_ms - TERMS.margin_ms) / DAY_MS * DAY_MS,
            _ => self.now_ms - TERMS.window_ms,
        };
        let recent = self.configured.iter().filter(|(_, until)| *until >= since);
        recent.map(|(limits, _)| value(limits, kind)).max().unwrap()
    }
}
