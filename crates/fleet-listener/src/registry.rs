//! The registry of sessions: at most one shim for each worker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::uri::Authority;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::hello::CheckedHello;
use super::inbound::Inbound;
use splitrail_fleet::{Fleet, WorkerSource};
use splitrail_proto::v1;
use splitrail_settings::secret::is_same;
use splitrail_telemetry::Metrics;

/// Sends messages to a shim.
pub(super) type Outbound = mpsc::Sender<Result<v1::AttachResponse, Status>>;

/// A stream whose hello was accepted, before it is given to a session.
pub(super) struct PendingStream {
    pub(super) hello: CheckedHello,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
}

/// The attached workers, and those whose shims may reconnect within the rejoin grace.
pub(super) struct SessionRegistry {
    fleet: Arc<Fleet>,
    max: usize,
    sessions: Mutex<Sessions>,
}

#[derive(Default)]
struct Sessions {
    next_number: u64,
    /// Key: model and worker id.
    by_name: BTreeMap<(String, String), Reservation>,
    /// Whose a worker is for the rest of its grace, by the same key; at most as many as there may be
    /// sessions.
    holders: BTreeMap<(String, String), Holder>,
}

/// The shim whose stream broke off. Until its grace ends, only its own process may attach as the
/// worker, or a process at the same URL: a shim that was killed and started again. Neither a process
/// that has come by the URL alone, nor one that has left, ends this.
struct Holder {
    secret: Vec<u8>,
    authority: Authority,
    until: Instant,
}

impl Holder {
    fn admits(&self, hello: &CheckedHello) -> bool {
        self.is_of(hello) || self.authority == hello.authority
    }

    fn is_of(&self, hello: &CheckedHello) -> bool {
        is_same(&hello.secret, &self.secret)
    }
}

struct Reservation {
    number: u64,
    /// The secret of the shim process with the newest stream.
    secret: Vec<u8>,
    authority: Authority,
    /// Whether a stream is open.
    is_live: bool,
    /// Takes a newer stream of the same shim to the session.
    streams: mpsc::Sender<Box<PendingStream>>,
    /// Cancelled when another shim takes the worker.
    evicted: CancellationToken,
}

/// Holds a reservation. Dropping the guard ends the reservation and revokes the worker.
pub(super) struct SessionGuard {
    registry: Arc<SessionRegistry>,
    key: (String, String),
    number: u64,
    pub(super) streams: mpsc::Receiver<Box<PendingStream>>,
    pub(super) evicted: CancellationToken,
}

/// The result of registering a stream.
pub(super) enum RegisterResult {
    /// The stream has a new reservation, and gets a session.
    Own(SessionGuard, Box<PendingStream>),
    /// The stream was passed to the session that the worker has.
    Passed,
    /// The stream was refused.
    Refused(Status, Outbound),
}

impl SessionRegistry {
    pub(super) fn new(fleet: Arc<Fleet>, max: usize) -> Self {
        Self { fleet, max, sessions: Mutex::default() }
    }

    /// Registers a stream for its worker. Only one that is not refused keeps its connection open.
    pub(super) fn register(self: &Arc<Self>, mut stream: Box<PendingStream>) -> RegisterResult {
        let hello = &stream.hello;
        let model = hello.served.name();
        let key = (model.to_owned(), hello.config.id.clone());
        let mut sessions = self.sessions();
        let now = Instant::now();
        sessions.holders.retain(|_, holder| holder.until > now);
        let holder = sessions.holders.get(&key);
        if holder.is_some_and(|holder| !holder.admits(hello)) {
            let status = Status::already_exists("the shim of this worker may still come back");
            return RegisterResult::Refused(status, stream.outbound);
        }
        let own = holder.filter(|holder| holder.is_of(hello));
        let (is_own, is_at_home) =
            (own.is_some(), own.is_some_and(|own| own.authority == hello.authority));
        let is_concerned = |(other, reservation): &(&(String, String), &Reservation)| {
            other.0 == model && (other.1 == key.1 || reservation.authority == hello.authority)
        };
        let concerned: Vec<_> = sessions.by_name.iter().filter(is_concerned).collect();
        if concerned.iter().any(|(other, reservation)| {
            let is_same = **other == key && (is_own || reservation.is_of(hello));
            reservation.is_live && !is_same && !is_at_home
        }) {
            let status = Status::already_exists("another process speaks for this worker");
            return RegisterResult::Refused(status, stream.outbound);
        }
        let others = concerned.into_iter().map(|(other, _)| other.clone());
        let others: Vec<_> = others.filter(|other| *other != key).collect();
        // Their streams have ended, or they came to this URL after the stream of its shim broke off.
        others.iter().for_each(|other| self.evict(&mut sessions, other));
        if let Some(reservation) = sessions.by_name.get_mut(&key)
            && (is_own || reservation.is_of(hello) || reservation.authority == hello.authority)
        {
            reservation.secret.clone_from(&hello.secret);
            reservation.authority.clone_from(&hello.authority);
            let Ok(place) = reservation.streams.try_reserve() else {
                let status = Status::unavailable("another stream of this shim is just starting");
                return RegisterResult::Refused(status, stream.outbound);
            };
            stream.inbound.accept();
            place.send(stream);
            reservation.is_live = true;
            if is_own {
                sessions.holders.remove(&key);
            }
            return RegisterResult::Passed;
        }
        self.evict(&mut sessions, &key);
        if sessions.by_name.len() >= self.max {
            let status = Status::resource_exhausted("`fleet.attach_max` shims are attached");
            return RegisterResult::Refused(status, stream.outbound);
        }
        let (sender, streams) = mpsc::channel(1);
        let (number, evicted) = (sessions.next_number, CancellationToken::new());
        sessions.next_number += 1;
        let reservation = Reservation {
            number,
            secret: hello.secret.clone(),
            authority: hello.authority.clone(),
            is_live: true,
            streams: sender,
            evicted: evicted.clone(),
        };
        sessions.by_name.insert(key.clone(), reservation);
        if is_own {
            sessions.holders.remove(&key);
        }
        let registry = Arc::clone(self);
        stream.inbound.accept();
        RegisterResult::Own(SessionGuard { registry, key, number, streams, evicted }, stream)
    }

    /// Removes a reservation, if there is one, and revokes its worker.
    fn evict(&self, sessions: &mut Sessions, key: &(String, String)) {
        if let Some(reservation) = sessions.by_name.remove(key) {
            reservation.evicted.cancel();
            self.fleet.revoke(&key.0, WorkerSource::Shim, &key.1);
        }
    }

    fn set_live(&self, key: &(String, String), number: u64, live: bool) {
        let mut sessions = self.sessions();
        let found = sessions.by_name.get_mut(key).filter(|found| found.number == number);
        found.into_iter().for_each(|found| found.is_live = live);
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Whether the caller proved that it is the process with the newest stream.
    fn is_of(&self, hello: &CheckedHello) -> bool {
        is_same(&hello.secret, &self.secret)
    }
}

impl SessionGuard {
    /// Keeps the worker for its shim, whose stream has broken off, for this time.
    pub(super) fn keep(&self, grace: Duration) {
        let mut sessions = self.registry.sessions();
        let Sessions { by_name, holders, .. } = &mut *sessions;
        let own = by_name.get(&self.key).filter(|own| own.number == self.number);
        let Some(Reservation { secret, authority, .. }) = own else { return };
        let now = Instant::now();
        holders.retain(|_, holder| holder.until > now);
        // The first holder stays: one that has come by its URL may be anybody.
        let is_kept = |(key, holder): (&(String, String), &Holder)| {
            key.0 == self.key.0 && (key.1 == self.key.1 || holder.authority == *authority)
        };
        if holders.len() < self.registry.max && !holders.iter().any(is_kept) {
            let (secret, authority) = (secret.clone(), authority.clone());
            holders.insert(self.key.clone(), Holder { secret, authority, until: now + grace });
        }
    }

    /// Marks the stream as open until the result is dropped.
    pub(super) fn live(&self, metrics: &Metrics) -> OpenStreamMark {
        self.registry.set_live(&self.key, self.number, true);
        let gauge = metrics.attached_shims.with_label_values(&[self.key.0.as_str()]);
        gauge.inc();
        OpenStreamMark {
            gauge,
            registry: Arc::clone(&self.registry),
            key: self.key.clone(),
            number: self.number,
        }
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut sessions = self.registry.sessions();
        let is_own = |reservation: &Reservation| reservation.number == self.number;
        if sessions.by_name.get(&self.key).is_some_and(is_own) {
            sessions.by_name.remove(&self.key);
            self.registry.fleet.revoke(&self.key.0, WorkerSource::Shim, &self.key.1);
        }
    }
}

/// Marks a worker's stream as open; dropping it marks the stream as closed.
pub(super) struct OpenStreamMark {
    gauge: prometheus::IntGauge,
    registry: Arc<SessionRegistry>,
    key: (String, String),
    number: u64,
}

impl Drop for OpenStreamMark {
    fn drop(&mut self) {
        self.gauge.dec();
        self.registry.set_live(&self.key, self.number, false);
    }
}
