//! What operators watch while the router runs: a snapshot of the cluster about once a second.
//!
//! One task samples for all subscribers, who share the bytes of the latest snapshot. A subscriber
//! that reads slowly misses snapshots; none are kept for it.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::core::Core;
use splitrail_settings::address_shares::{AddressPlace, AddressShares};
use splitrail_telemetry::{TaskName, restart_on_panic};

mod decisions;
mod history;
mod model;
mod pace;
mod readings;
mod sampler;
mod snapshot;
mod spans;
mod stages;
mod worker;

pub use history::Shed;
use pace::{INTERVAL, READING_INTERVAL, send_time};
use sampler::Sampler;
pub(crate) use snapshot::in_order;

/// Maximum number of subscribers.
pub const SUBSCRIBERS_MAX: usize = 64;

/// The latest snapshot, and who may subscribe to it.
pub struct Live {
    /// The latest snapshot as a server-sent event; empty while there are no subscribers.
    latest: watch::Sender<Bytes>,
    places: Arc<AddressShares>,
    /// Notified when a subscriber finds no snapshot.
    wanted: Notify,
    /// Cancelled at the end of a drain.
    ended: CancellationToken,
    /// The last minutes of each model.
    history: Mutex<history::History>,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            latest: watch::Sender::new(Bytes::new()),
            places: Arc::default(),
            wanted: Notify::new(),
            ended: CancellationToken::new(),
            history: Mutex::default(),
        }
    }
}

/// Why nobody can subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeRefusal {
    /// There are [`SUBSCRIBERS_MAX`] subscribers, or too many of the address.
    #[error(
        "{SUBSCRIBERS_MAX} subscribers may watch this router, and those of one address leave places \
         for others; close one of them"
    )]
    Full,
    /// The router has drained.
    #[error("the router has drained")]
    Ended,
}

impl Live {
    /// Starts the task that samples; dropping the set ends it.
    pub fn start(core: Arc<Core>) -> (Arc<Self>, JoinSet<()>) {
        let live = Arc::new(Self::default());
        let mut task = JoinSet::new();
        let sampled = Arc::clone(&live);
        let run = move || sample(Arc::clone(&sampled), Arc::clone(&core));
        task.spawn(restart_on_panic(TaskName::new("live page"), run));
        (live, task)
    }

    /// Subscribes a client of this address to the snapshots.
    ///
    /// # Errors
    /// There are too many subscribers, or the router has drained.
    pub fn subscribe(&self, address: IpAddr) -> Result<Subscriber, SubscribeRefusal> {
        if self.ended.is_cancelled() {
            return Err(SubscribeRefusal::Ended);
        }
        let place = self.places.take(address, SUBSCRIBERS_MAX, usize::MAX);
        let place = place.ok_or(SubscribeRefusal::Full)?;
        let mut snapshots = self.latest.subscribe();
        let is_empty = snapshots.borrow().is_empty();
        match is_empty {
            true => self.wanted.notify_one(),
            false => snapshots.mark_changed(),
        }
        let (ended, next_at) = (self.ended.clone(), Instant::now());
        Ok(Subscriber { snapshots, ended, next_at, _place: place })
    }

    /// The last minutes of a model, as columns of equal length; `None` if the model is not known.
    pub fn history(&self, model: &str) -> Option<Value> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).columns(model)
    }

    /// Requests that were refused because of load within the last minute, by model and reason.
    pub fn shed(&self) -> Vec<Shed> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).shed()
    }

    /// Ends all streams.
    pub fn end(&self) {
        self.ended.cancel();
    }
}

/// One subscriber. Dropping it makes room for another.
pub struct Subscriber {
    snapshots: watch::Receiver<Bytes>,
    ended: CancellationToken,
    /// When this subscriber may be sent the next snapshot.
    next_at: Instant,
    _place: AddressPlace,
}

impl Subscriber {
    /// The next snapshot as a server-sent event; `None` once the router has drained.
    pub async fn next(&mut self) -> Option<Bytes> {
        let next = async {
            sleep_until(self.next_at).await;
            loop {
                self.snapshots.changed().await.ok()?;
                let snapshot = self.snapshots.borrow_and_update().clone();
                if !snapshot.is_empty() {
                    return Some(snapshot);
                }
            }
        };
        let snapshot = tokio::select! {
            biased;
            () = self.ended.cancelled() => return None,
            snapshot = next => snapshot?,
        };
        // The sampler keeps the pace as well, but a new subscriber comes between two of its
        // snapshots.
        self.next_at = Instant::now() + send_time(snapshot.len());
        Some(snapshot)
    }
}

/// Samples until the task is ended.
async fn sample(live: Arc<Live>, core: Arc<Core>) {
    let mut sampler = Sampler::default();
    let (mut next_reading, mut next_snapshot) = (Instant::now(), Instant::now());
    loop {
        let is_watched = live.latest.receiver_count() > 0;
        if !is_watched {
            live.latest.send_if_modified(|latest| !std::mem::take(latest).is_empty());
        }
        let now = Instant::now();
        let wants_snapshot = is_watched && now >= next_snapshot;
        if wants_snapshot || now >= next_reading {
            let is_kept = now >= next_reading;
            // Off the reactor, because a large fleet takes milliseconds.
            let (shared, core) = (Arc::clone(&live), Arc::clone(&core));
            let sampling = tokio::task::spawn_blocking(move || {
                sampler.read(&core, is_kept, &shared.history);
                let snapshot = wants_snapshot.then(|| sampler.snapshot(&core, &shared.shed()));
                (sampler, snapshot)
            });
            let snapshot;
            (sampler, snapshot) = sampling.await.unwrap_or_else(|_| {
                tracing::error!("no snapshot could be made for the live page: a defect");
                (Sampler::default(), None)
            });
            if is_kept {
                next_reading = now + READING_INTERVAL;
            }
            if wants_snapshot {
                let event = snapshot.unwrap_or_default();
                next_snapshot = Instant::now() + send_time(event.len()).max(INTERVAL);
                live.latest.send_replace(event);
            }
            continue;
        }
        tokio::select! {
            () = sleep_until(next_reading) => {}
            () = sleep_until(next_snapshot), if is_watched => {}
            () = live.wanted.notified(), if !is_watched => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[tokio::test]
    async fn a_subscriber_that_was_away_gets_the_latest_snapshot_and_no_other() {
        let live = Live::default();
        let mut subscriber = live.subscribe(ADDRESS).unwrap();
        for number in 0..10_000u32 {
            live.latest.send_replace(Bytes::from(number.to_string()));
        }
        assert_eq!(subscriber.next().await.unwrap(), "9999");
        live.latest.send_replace(Bytes::from_static(b"later"));
        assert_eq!(subscriber.next().await.unwrap(), "later");
        let mut second = live.subscribe(ADDRESS).unwrap();
        assert_eq!(second.next().await.unwrap(), "later");
    }

    #[tokio::test]
    async fn places_are_bounded_and_come_back() {
        let live = Live::default();
        let mut all: Vec<_> = std::iter::from_fn(|| live.subscribe(ADDRESS).ok()).collect();
        assert_eq!(all.len(), SUBSCRIBERS_MAX * 8 / 9 + 1);
        assert_eq!(live.subscribe(ADDRESS).err(), Some(SubscribeRefusal::Full));
        drop(live.subscribe("10.0.0.1".parse().unwrap()).unwrap());
        all.pop();
        drop(live.subscribe(ADDRESS).unwrap());
        drop(all);
        live.end();
        assert_eq!(live.subscribe(ADDRESS).err(), Some(SubscribeRefusal::Ended));
    }

    #[tokio::test]
    async fn a_subscriber_learns_of_the_end() {
        let live = Live::default();
        let mut subscriber = live.subscribe(ADDRESS).unwrap();
        live.end();
        assert_eq!(subscriber.next().await, None);
    }

    #[test]
    fn a_large_snapshot_takes_its_time() {
        assert_eq!(send_time(0), Duration::ZERO);
        assert_eq!(send_time(40_000), Duration::from_secs(4));
        assert!(send_time(usize::MAX) > Duration::from_secs(1 << 40));
    }
}
