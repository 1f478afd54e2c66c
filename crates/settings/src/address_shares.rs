//! Divides places, such as those for connections, among the addresses of clients.
//!
//! An address may hold at most [`SHARE_OF_FREE`] times the number of free places, so a single one
//! can hold at most eight ninths of all, and an address that holds none gets a place whenever one
//! is free.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of places that a client (of weight 1) may hold for each free place.
pub const SHARE_OF_FREE: usize = 8;

/// The address that stands for a client: for IPv6 the /64 prefix, because one site has 2^64
/// addresses.
pub fn client_prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

/// The places that are taken, by client address. A lock is sufficient, because it is held for a
/// look-up alone, and a place is taken at most once for each connection or request.
#[derive(Debug, Default)]
pub struct AddressShares {
    held: Mutex<HeldPlaces>,
}

#[derive(Debug, Default)]
struct HeldPlaces {
    /// Addresses that hold no place are removed.
    by_address: HashMap<IpAddr, usize>,
    total: usize,
}

impl AddressShares {
    /// A place for an address, which may hold at most `of_one_max` of all `places`; `None` if no
    /// place is free for it.
    pub fn take(
        self: &Arc<Self>,
        address: IpAddr,
        places: usize,
        of_one_max: usize,
    ) -> Option<AddressPlace> {
        let address = client_prefix(address);
        let mut all = self.held();
        let free = places.saturating_sub(all.total);
        let held = all.by_address.get(&address).copied().unwrap_or(0);
        if held >= free.saturating_mul(SHARE_OF_FREE).min(of_one_max) {
            return None;
        }
        all.by_address.insert(address, held + 1);
        all.total += 1;
        drop(all);
        Some(AddressPlace { shares: Arc::clone(self), address })
    }

    /// A panic while the lock was held cannot leave the numbers half-changed.
    fn held(&self) -> MutexGuard<'_, HeldPlaces> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place. Dropping it returns it.
#[derive(Debug)]
pub struct AddressPlace {
    shares: Arc<AddressShares>,
    address: IpAddr,
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut all = self.shares.held();
        all.total -= 1;
        if let Some(held) = all.by_address.get_mut(&self.address) {
            *held -= 1;
            if *held == 0 {
                all.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Takes places for an address while possible.
    fn fill(
        shares: &Arc<AddressShares>,
        address: &str,
        places: usize,
        of_one_max: usize,
    ) -> Vec<AddressPlace> {
        let address = address.parse().unwrap();
        std::iter::from_fn(|| shares.take(address, places, of_one_max)).collect()
    }

    #[test]
    fn one_address_gets_nearly_all_places_and_leaves_some_for_others() {
        let shares = Arc::default();
        let fill = |address| fill(&shares, address, 90, usize::MAX);
        let all = [fill("10.0.0.1"), fill("10.0.0.2"), fill("10.0.0.3")];
        assert_eq!(all.each_ref().map(Vec::len), [80, 9, 1]);
        let fewer = shares.take("10.0.0.4".parse().unwrap(), 88, usize::MAX);
        assert!(fewer.is_none(), "the number of places was lowered");
        drop(all);
        let held = shares.held();
        assert!(held.by_address.is_empty() && held.total == 0, "nothing is left");
    }

    #[test]
    fn an_address_gets_at_most_its_limit_of_places() {
        let shares = Arc::default();
        let fill = |address| fill(&shares, address, 900, 20);
        let first = fill("2001:db8::1");
        let same = fill("2001:db8::2");
        let other = fill("2001:db8:0:1::1");
        assert_eq!([first.len(), same.len(), other.len()], [20, 0, 20], "places of a /64 prefix");
    }
}
