//! The registry of sessions: at most one shim for each worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::uri::Authority;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::greet::Guest;
use super::inbound::Inbound;
use super::tokens::same;
use crate::{Fleet, Source};
use splitrail_proto::v1;
use splitrail_telemetry::Metrics;

/// Answers on their way to a shim.
pub(super) type Outbound = mpsc::Sender<Result<v1::AttachResponse, Status>>;

/// A stream that has said who it is.
pub(super) struct Newcomer {
    pub(super) guest: Guest,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
}

/// Everybody who is attached, or may come back.
pub(super) struct Seats {
    fleet: Arc<Fleet>,
    max: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    next: u64,
    /// By model and worker.
    by_name: BTreeMap<(String, String), Seat>,
}

struct Seat {
    number: u64,
    /// That of the process whose stream came last; empty if it has none.
    secret: Vec<u8>,
    authority: Authority,
    /// Whether somebody is on the line.
    is_live: bool,
    /// Where a newer stream of the same shim goes.
    newcomers: mpsc::Sender<Box<Newcomer>>,
    /// Fires when somebody else takes the worker.
    evicted: CancellationToken,
}

/// A seat, by whoever has it: left, it is free, and the worker is revoked.
pub(super) struct Chair {
    seats: Arc<Seats>,
    key: (String, String),
    number: u64,
    pub(super) newcomers: mpsc::Receiver<Box<Newcomer>>,
    pub(super) evicted: CancellationToken,
}

/// What became of a newcomer.
pub(super) enum Seated {
    /// It has a seat of its own.
    Own(Chair, Box<Newcomer>),
    /// The session that the worker has goes on with it.
    Passed,
    /// There is none for it.
    Refused(Status, Outbound),
}

impl Seats {
    pub(super) fn new(fleet: Arc<Fleet>, max: usize) -> Self {
        Self { fleet, max, taken: Mutex::default() }
    }

    /// Gives a newcomer a seat, if it may have one.
    pub(super) fn take(self: &Arc<Self>, newcomer: Box<Newcomer>) -> Seated {
        let guest = &newcomer.guest;
        let model = guest.served.name();
        let key = (model.to_owned(), guest.config.id.clone());
        let mut taken = self.taken();
        let is_concerned = |(other, seat): &(&(String, String), &Seat)| {
            other.0 == model && (other.1 == key.1 || seat.authority == guest.authority)
        };
        let concerned: Vec<_> = taken.by_name.iter().filter(is_concerned).collect();
        if concerned
            .iter()
            .any(|(other, seat)| seat.is_live && !(**other == key && seat.is_of(guest)))
        {
            let status = Status::already_exists("another process speaks for this worker");
            return Seated::Refused(status, newcomer.outbound);
        }
        let others = concerned.into_iter().map(|(other, _)| other.clone());
        let others: Vec<_> = others.filter(|other| *other != key).collect();
        // Their streams have ended. They may come back, but this one is here.
        others.iter().for_each(|other| self.evict(&mut taken, other));
        if let Some(seat) = taken.by_name.get_mut(&key)
            && (seat.is_of(guest) || seat.authority == guest.authority)
        {
            seat.secret.clone_from(&guest.secret);
            seat.authority.clone_from(&guest.authority);
            return match seat.newcomers.try_send(newcomer) {
                Ok(()) => {
                    seat.is_live = true;
                    Seated::Passed
                }
                Err(full) => {
                    let status = Status::unavailable("another stream of it is just beginning");
                    Seated::Refused(status, full.into_inner().outbound)
                }
            };
        }
        self.evict(&mut taken, &key);
        if taken.by_name.len() >= self.max {
            let status = Status::resource_exhausted("`fleet.attach_max` shims are attached");
            return Seated::Refused(status, newcomer.outbound);
        }
        let (sender, newcomers) = mpsc::channel(1);
        let (number, evicted) = (taken.next, CancellationToken::new());
        taken.next += 1;
        let seat = Seat {
            number,
            secret: guest.secret.clone(),
            authority: guest.authority.clone(),
            is_live: true,
            newcomers: sender,
            evicted: evicted.clone(),
        };
        taken.by_name.insert(key.clone(), seat);
        let seats = Arc::clone(self);
        Seated::Own(Chair { seats, key, number, newcomers, evicted }, newcomer)
    }

    /// Ends what is left of a seat, if it is there.
    fn evict(&self, taken: &mut Taken, key: &(String, String)) {
        if let Some(seat) = taken.by_name.remove(key) {
            seat.evicted.cancel();
            self.fleet.revoke(&key.0, Source::Shim, &key.1);
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Whether a caller has shown that it is the process whose stream came last.
    fn is_of(&self, guest: &Guest) -> bool {
        !self.secret.is_empty() && same(&guest.secret, &self.secret)
    }
}

impl Chair {
    /// Somebody is on the line until the result is dropped.
    pub(super) fn live(&self, metrics: &Metrics) -> Live {
        self.set_live(true);
        let gauge = metrics.attached_workers.with_label_values(&[self.key.0.as_str()]);
        gauge.inc();
        Live { gauge, seats: Arc::clone(&self.seats), key: self.key.clone(), number: self.number }
    }

    fn set_live(&self, live: bool) {
        self.seats.set_live(&self.key, self.number, live);
    }
}

impl Seats {
    fn set_live(&self, key: &(String, String), number: u64, live: bool) {
        let mut taken = self.taken();
        if let Some(seat) = taken.by_name.get_mut(key).filter(|seat| seat.number == number) {
            seat.is_live = live;
        }
    }
}

impl Drop for Chair {
    fn drop(&mut self) {
        let mut taken = self.seats.taken();
        if taken.by_name.get(&self.key).is_some_and(|seat| seat.number == self.number) {
            taken.by_name.remove(&self.key);
            self.seats.fleet.revoke(&self.key.0, Source::Shim, &self.key.1);
        }
    }
}

/// Somebody on the line.
pub(super) struct Live {
    gauge: prometheus::IntGauge,
    seats: Arc<Seats>,
    key: (String, String),
    number: u64,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.gauge.dec();
        self.seats.set_live(&self.key, self.number, false);
    }
}
