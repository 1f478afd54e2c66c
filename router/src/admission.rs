//! Divides the places for requests in flight (`limits.in_flight_max`; one per prompt) fairly among
//! clients.
//!
//! Places are shared by a dynamic threshold: a client may hold at most [`SHARE_OF_FREE`] times the
//! number of free places. A single client can hold at most eight ninths of the places. When other
//! clients come, fewer places are free. A client above its share then gets no further places until
//! it holds fewer, so that the shares become equal (or proportional to the weights of tenants). A
//! client that holds none gets a place whenever one is free. No request waits, nothing is reserved
//! for absent clients, and a decision needs only two numbers: the places that the client holds and
//! the free places.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use dashmap::DashMap;
use http::HeaderMap;

use splitrail_api::session::session;
use splitrail_api::shares::ClientShare;
use splitrail_config::model::FairBy;
use splitrail_settings::address_shares::{SHARE_OF_FREE, client_prefix};

/// The free places. Only their number is stored, because no request waits for one.
#[derive(Debug)]
pub struct FreePlaces {
    places: usize,
    free: AtomicUsize,
}

impl FreePlaces {
    /// The given number of places, all of them free.
    pub fn new(places: usize) -> Self {
        Self { places, free: AtomicUsize::new(places) }
    }

    /// Total number of places.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Number of free places.
    pub fn free(&self) -> usize {
        self.free.load(Relaxed)
    }

    /// Number of places that are taken.
    pub fn in_use(&self) -> usize {
        self.places.saturating_sub(self.free())
    }

    /// Takes places; returns how many were free before, or `None` if there were not enough.
    pub fn enter(&self, places: usize) -> Option<usize> {
        self.free.fetch_update(Relaxed, Relaxed, |free| free.checked_sub(places)).ok()
    }

    /// Returns places.
    pub fn leave(&self, places: usize) {
        self.free.fetch_add(places, Relaxed);
    }
}

/// The places that are taken, by client.
#[derive(Debug, Default)]
pub struct Admission {
    /// The number of places that each client holds. Clients without places are removed, so there
    /// are at most `limits.in_flight_max` entries.
    shares: DashMap<u64, usize>,
    /// Randomly seeded, so that clients cannot choose keys that collide.
    hasher: RandomState,
}

impl Admission {
    /// The client to which the places of a request without a tenant are charged; `None` if places
    /// are not shared. The number of the client is a hash: neither an API key nor an address is
    /// stored.
    pub fn client(
        &self,
        fair_by: &FairBy,
        peer: IpAddr,
        headers: &HeaderMap,
    ) -> Option<ClientShare> {
        match fair_by {
            FairBy::None {} => None,
            FairBy::Address {} => Some(self.of_address(peer)),
            FairBy::Session {} => Some(match session(headers) {
                Some(session) => {
                    ClientShare { number: self.number_of_session(session), weight: 1.0 }
                }
                None => self.of_address(peer),
            }),
            FairBy::Header { name } => {
                let number = self.hasher.hash_one(headers.get(name).map(|value| value.as_bytes()));
                Some(ClientShare { number, weight: 1.0 })
            }
        }
    }

    /// The number that stands for a session.
    pub fn number_of_session(&self, session: &str) -> u64 {
        self.hasher.hash_one(session)
    }

    /// The client that an address stands for.
    pub fn of_address(&self, peer: IpAddr) -> ClientShare {
        ClientShare { number: self.hasher.hash_one(client_prefix(peer)), weight: 1.0 }
    }

    /// Whether a client may take a place while `free` places are free.
    pub fn may_take_place(&self, client: Option<ClientShare>, free: usize) -> bool {
        let Some(client) = client else { return true };
        let held = self.shares.get(&client.number).map_or(0, |held| *held);
        held < most(client, free)
    }

    /// Charges places to a client; `free` places were free before. `None` if the client would
    /// exceed its share.
    pub fn share(
        self: &Arc<Self>,
        client: Option<ClientShare>,
        free: usize,
        places: usize,
    ) -> Option<Share> {
        let Some(client) = client else { return Some(Share { places, of: None }) };
        let mut held = self.shares.entry(client.number).or_insert(0);
        // As if the places were taken one after the other: the last one finds the fewest free.
        let others = places.saturating_sub(1);
        let is_fair = *held + others < most(client, free.saturating_sub(others));
        if is_fair {
            *held += places;
        }
        let holds_none = *held == 0;
        drop(held);
        if holds_none {
            self.forget(client.number);
        }
        is_fair.then(|| Share { places, of: Some((Arc::clone(self), client.number)) })
    }

    /// Removes a client that holds no places.
    fn forget(&self, client: u64) {
        self.shares.remove_if(&client, |_, held| *held == 0);
    }
}

/// Number of places from which a client gets no further one while `free` places are free. A client
/// that holds none always gets a free place.
fn most(client: ClientShare, free: usize) -> usize {
    let most = free as f64 * SHARE_OF_FREE as f64 * client.weight;
    (most as usize).max(free.min(1))
}

/// Places of one request. Dropping this value removes them from the client's share.
#[derive(Debug)]
pub struct Share {
    places: usize,
    of: Option<(Arc<Admission>, u64)>,
}

impl Share {
    /// Number of places.
    pub fn places(&self) -> usize {
        self.places
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let Some((admission, client)) = &self.of else { return };
        if let Some(mut held) = admission.shares.get_mut(client) {
            *held -= self.places;
        }
        admission.forget(*client);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLACES: usize = 900;

    struct Room {
        admission: Arc<Admission>,
        held: Vec<Vec<Share>>,
        weights: Vec<f64>,
    }

    impl Room {
        fn new(clients: usize) -> Self {
            Self::of_weights(&vec![1.0; clients])
        }

        fn of_weights(weights: &[f64]) -> Self {
            let held = weights.iter().map(|_| Vec::new()).collect();
            Self { admission: Arc::default(), held, weights: weights.to_vec() }
        }

        fn free(&self) -> usize {
            PLACES - self.held.iter().map(Vec::len).sum::<usize>()
        }

        /// Asks for a place; returns whether the client got one.
        fn ask(&mut self, client: usize) -> bool {
            let place = client;
            let client = Some(ClientShare { number: client as u64, weight: self.weights[client] });
            let free = self.free();
            let share = (free > 0).then(|| self.admission.share(client, free, 1)).flatten();
            let taken = share.is_some();
            self.held[place].extend(share);
            taken
        }
    }

    #[test]
    fn one_client_gets_nearly_all_places_and_leaves_one_for_another() {
        let mut room = Room::new(2);
        while room.ask(0) {}
        assert_eq!(room.held[0].len(), PLACES * 8 / 9);
        for _ in 0..50 {
            assert!(room.ask(1), "the second client is served");
        }
    }

    /// Lets clients that always ask for more than there is share the places; returns what each has.
    fn contended(weights: &[f64]) -> Vec<usize> {
        let mut room = Room::of_weights(weights);
        while room.ask(0) {}
        for round in 0..20_000 {
            // Some request ends.
            for client in 0..weights.len() {
                room.ask(client);
            }
            let in_flight = PLACES - room.free();
            let mut ends = round * 7919 % in_flight;
            let whose = room.held.iter_mut().find(|held| {
                let here = ends < held.len();
                ends = ends.saturating_sub(held.len());
                here
            });
            whose.unwrap().pop();
        }
        room.held.iter().map(Vec::len).collect()
    }

    #[test]
    fn greedy_clients_get_shares_in_proportion_to_their_weights() {
        let counts = contended(&[1.0, 1.0, 1.0]);
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= PLACES / 20, "{counts:?}");
        let counts = contended(&[3.0, 1.0]);
        let ratio = counts[0] as f64 / counts[1] as f64;
        assert!((2.7..3.3).contains(&ratio), "{counts:?}");
    }

    #[test]
    fn a_client_is_an_address_prefix_or_a_header() {
        let admission = Admission::default();
        let mut headers = HeaderMap::new();
        let key = |fair: &FairBy, peer: &str, headers: &HeaderMap| {
            admission.client(fair, peer.parse().unwrap(), headers)
        };
        let none = HeaderMap::new();
        assert_eq!(key(&FairBy::None {}, "10.0.0.1", &none), None);
        let by = FairBy::Address {};
        assert_eq!(key(&by, "10.0.0.1", &none), key(&by, "::ffff:10.0.0.1", &none));
        assert_ne!(key(&by, "10.0.0.1", &none), key(&by, "10.0.0.2", &none));
        assert_eq!(key(&by, "2001:db8::1", &none), key(&by, "2001:db8::ffff:2", &none));
        assert_ne!(key(&by, "2001:db8::1", &none), key(&by, "2001:db8:0:1::1", &none));
        let by = FairBy::Session {};
        let session: HeaderMap =
            [("x-session-id".parse().unwrap(), "s".parse().unwrap())].into_iter().collect();
        assert_eq!(key(&by, "10.0.0.1", &session), key(&by, "10.0.0.2", &session));
        assert_ne!(key(&by, "10.0.0.1", &session), key(&by, "10.0.0.1", &none));
        assert_ne!(key(&by, "10.0.0.1", &none), key(&by, "10.0.0.2", &none));
        let by = FairBy::Header { name: "X-API-Key".into() };
        headers.insert("x-api-key", "a".parse().unwrap());
        assert_eq!(key(&by, "10.0.0.1", &headers), key(&by, "10.0.0.2", &headers));
        assert_ne!(key(&by, "10.0.0.1", &headers), key(&by, "10.0.0.1", &none));
    }

    #[test]
    fn a_batch_takes_as_many_places_as_its_prompts_would_separately() {
        let admission = Arc::new(Admission::default());
        let key = Some(ClientShare { number: 1, weight: 1.0 });
        let one_by_one = |free: usize, places: usize| {
            let admission = Arc::new(Admission::default());
            let all: Vec<_> = (0..places).map(|i| admission.share(key, free - i, 1)).collect();
            all.iter().all(Option::is_some)
        };
        for (free, places) in [(90, 80), (90, 81), (64, 64), (9, 8), (1, 1), (4, 2)] {
            let batch = admission.share(key, free, places);
            assert_eq!(batch.is_some(), one_by_one(free, places), "{places} of {free}");
            drop(batch);
            assert!(admission.shares.is_empty(), "nothing is left, refused or not");
        }
    }

    proptest! {
        /// A client that holds nothing is admitted whenever a place is free, and clients that left
        /// take no memory.
        #[test]
        fn no_client_is_starved_and_clients_that_left_take_no_memory(
            steps in prop::collection::vec((0_usize..8, any::<bool>()), 0..400),
        ) {
            let mut room = Room::new(8);
            for (client, asks) in steps {
                if asks {
                    let (had, free) = (room.held[client].len(), room.free());
                    room.ask(client);
                    prop_assert!(had > 0 || free == 0 || room.held[client].len() == 1);
                } else {
                    room.held[client].pop();
                }
            }
            let admission = Arc::clone(&room.admission);
            drop(room);
            prop_assert!(admission.shares.is_empty());
        }
    }
}
