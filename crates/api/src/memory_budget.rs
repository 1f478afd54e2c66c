//! The budget for the memory that requests make the router hold.
//!
//! Everything that a client, or an engine on its behalf, can make the router keep is charged here
//! before it is allocated: the bytes of a body, what is built from them, and the bytes of a reply
//! that wait for the client. `limits.request_memory_max` is the bound. A [`Charge`] is stored
//! with the bytes that it accounts for, and ends when it is dropped.
//!
//! Clients share the budget as they share places in flight: each may hold at most
//! [`SHARE_OF_FREE`] times what is free, times its weight, so that one client cannot take the memory
//! of all others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use prometheus::IntCounterVec;

use crate::error::{Error, ErrorKind};
use crate::shares::ClientShare;
use splitrail_config::model::Limits;
use splitrail_settings::address_shares::SHARE_OF_FREE;

/// Counts a request that is refused because all requests together would hold more than
/// `limits.request_memory_max`, and returns the error.
pub fn shed(counted: &IntCounterVec) -> Error {
    counted.with_label_values(&["none", "request_memory"]).inc();
    full()
}

/// The error where the memory of all requests is in use.
pub fn full() -> Error {
    let message = "the memory of all requests has reached limits.request_memory_max, or this client \
                   holds its share of it; retry later";
    Error::new(ErrorKind::Overloaded, message)
}

/// The total of the current charges of all requests, or of those of one client.
#[derive(Debug, Default)]
pub struct MemoryBudget {
    held_bytes: AtomicUsize,
    /// The budgets of the clients that have requests, by their numbers.
    clients: Mutex<HashMap<u64, Weak<MemoryBudget>>>,
    /// The client, if the budget is that of one.
    of: Option<ClientBudget>,
}

/// The client of a budget, and the budget that it shares with the others.
#[derive(Debug)]
struct ClientBudget {
    number: u64,
    /// The bits of the client's weight. A reload may change it.
    weight: AtomicU64,
    all: Arc<MemoryBudget>,
}

impl ClientBudget {
    /// Whether the client may hold `held_bytes` while `free_bytes` are left. It may always hold as
    /// much as is then free: with any weight, its requests are served while others have none.
    fn may_hold(&self, held_bytes: usize, free_bytes: usize) -> bool {
        let share = SHARE_OF_FREE as f64 * f64::from_bits(self.weight.load(Relaxed));
        held_bytes as f64 <= free_bytes as f64 * share.max(1.0)
    }
}

impl MemoryBudget {
    /// The budget of a client: its charges count here as well.
    pub fn of_client(self: &Arc<Self>, client: ClientShare) -> Arc<Self> {
        let ClientShare { number, weight } = client;
        let mut clients = self.clients();
        if let Some(known) = clients.get(&number).and_then(Weak::upgrade) {
            known.of.iter().for_each(|of| of.weight.store(weight.to_bits(), Relaxed));
            return known;
        }
        let weight = AtomicU64::new(weight.to_bits());
        let of = Some(ClientBudget { number, weight, all: Arc::clone(self) });
        let (held_bytes, further) = Default::default();
        let budget = Arc::new(Self { held_bytes, clients: further, of });
        clients.insert(number, Arc::downgrade(&budget));
        budget
    }

    /// A panic while the lock was held cannot leave the map half-changed.
    fn clients(&self) -> MutexGuard<'_, HashMap<u64, Weak<Self>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `bytes` to a charge of `charged_bytes` if the total is then at most `max_bytes`, and the
    /// client has its share. A client that holds nothing but this charge gets what is free: a single
    /// body, however it arrives.
    fn add(&self, bytes: usize, charged_bytes: usize, max_bytes: usize) -> bool {
        let all = self.of.as_ref().map_or(self, |of| &*of.all);
        let before = all.held_bytes.fetch_add(bytes, Relaxed);
        let free = before.checked_add(bytes).and_then(|held| max_bytes.checked_sub(held));
        let fits = free.is_some_and(|free| match &self.of {
            None => true,
            Some(of) => {
                let held = self.held_bytes.fetch_add(bytes, Relaxed);
                let fits = held == charged_bytes || of.may_hold(held.saturating_add(bytes), free);
                if !fits {
                    self.held_bytes.fetch_sub(bytes, Relaxed);
                }
                fits
            }
        });
        if !fits {
            all.held_bytes.fetch_sub(bytes, Relaxed);
        }
        fits
    }

    fn subtract(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes, Relaxed);
        if let Some(of) = &self.of {
            of.all.held_bytes.fetch_sub(bytes, Relaxed);
        }
    }

    /// A new charge of 0 bytes.
    pub fn charge(self: &Arc<Self>) -> Charge {
        Charge { budget: Arc::clone(self), bytes: 0 }
    }

    /// The total of all charges, in bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.load(Relaxed)
    }
}

/// A part of the budget, for bytes that are held or about to be allocated. Dropping it returns
/// them.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<MemoryBudget>,
    bytes: usize,
}

impl Charge {
    /// Charges `bytes` more if the total of all charges then is at most `max_bytes`, and the client
    /// does not exceed its share. Otherwise returns `false` and changes nothing: the request must be
    /// refused, with [`shed`], before anything is allocated.
    #[must_use]
    pub fn grow(&mut self, bytes: usize, max_bytes: usize) -> bool {
        let fits = self.budget.add(bytes, self.bytes, max_bytes);
        if fits {
            self.bytes += bytes;
        }
        fits
    }

    /// Returns `bytes` to the budget, or all that the charge holds if that is less.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.subtract(bytes);
    }

    /// Adds another charge of the same budget to this one.
    pub fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.budget, &other.budget), "charges of two clients");
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Ties the charge to `bytes`: it ends when the last reference to them is dropped.
    pub fn hold(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(ChargedBytes { bytes, _charge: self })
    }

    /// The size of the charge in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Bytes and their charge.
struct ChargedBytes<B> {
    bytes: B,
    _charge: Charge,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for ChargedBytes<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl Drop for MemoryBudget {
    fn drop(&mut self) {
        let Some(of) = &self.of else { return };
        let mut clients = of.all.clients();
        // Another budget of the client may have taken the place meanwhile.
        let is_own = |known: &Weak<Self>| known.strong_count() == 0;
        if clients.get(&of.number).is_some_and(is_own) {
            clients.remove(&of.number);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.subtract(self.bytes);
    }
}

/// A [`Charge`] with the limit of the budget, and the error for requests that exceed it.
pub struct Meter<'a> {
    charge: Charge,
    max_bytes: usize,
    refuse: &'a (dyn Fn() -> Error + Sync),
}

impl<'a> Meter<'a> {
    /// A meter that grows `charge` while all charges together hold at most `max_bytes`.
    pub fn new(charge: Charge, max_bytes: usize, refuse: &'a (dyn Fn() -> Error + Sync)) -> Self {
        Self { charge, max_bytes, refuse }
    }

    /// Charges bytes that are about to be allocated.
    ///
    /// # Errors
    /// If the limit would be exceeded.
    pub fn take(&mut self, bytes: usize) -> Result<(), Error> {
        match self.charge.grow(bytes, self.max_bytes) {
            true => Ok(()),
            false => Err((self.refuse)()),
        }
    }

    /// Returns bytes that were freed.
    pub fn give_back(&mut self, bytes: usize) {
        self.charge.shrink(bytes);
    }

    /// The charge, to be stored with what is kept.
    pub fn into_charge(self) -> Charge {
        self.charge
    }
}

/// The meters for preparing a request.
pub struct Memory<'a> {
    /// Memory that the request holds until it ends.
    pub kept: Meter<'a>,
    /// Memory that is freed when the request has been prepared.
    pub work: Meter<'a>,
}

/// What reading a part of a request may use.
pub struct Allowance<'a, 'm> {
    /// The configured limits.
    pub limits: &'a Limits,
    /// The meter of memory that is freed when the request has been prepared.
    pub work: &'a mut Meter<'m>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_charge_that_does_not_fit_changes_nothing() {
        let budget = Arc::new(MemoryBudget::default());
        let (mut first, mut second) = (budget.charge(), budget.charge());
        assert!(first.grow(70, 100));
        assert!(!second.grow(31, 100), "one byte too many");
        assert!(!second.grow(usize::MAX, 100), "nor does the sum overflow");
        assert_eq!((second.bytes(), budget.held_bytes()), (0, 70));
        assert!(second.grow(30, 100));
        first.shrink(20);
        assert!(second.grow(20, 100));
        drop(first);
        assert_eq!(budget.held_bytes(), 50);
    }

    #[test]
    fn bytes_give_back_their_charge_with_their_last_part() {
        let budget = Arc::new(MemoryBudget::default());
        let mut charge = budget.charge();
        assert!(charge.grow(4, 100));
        let mut bytes = charge.hold(b"body".to_vec());
        let part = bytes.split_to(2);
        drop(bytes);
        assert_eq!((&part[..], budget.held_bytes()), (&b"bo"[..], 4));
        drop(part);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn one_client_leaves_memory_to_others_and_takes_none_when_it_has_left() {
        let all = Arc::new(MemoryBudget::default());
        let client = |number| all.of_client(ClientShare { number, weight: 1.0 });
        let (mut greedy, mut further) = (client(1).charge(), client(1).charge());
        assert!(greedy.grow(500, 900) && further.grow(300, 900), "eight ninths");
        assert!(!greedy.grow(1, 900) && !client(1).charge().grow(1, 900));
        let mut other = client(2).charge();
        assert!(other.grow(80, 900), "a client that holds nothing gets what is free");
        assert!(!other.grow(81, 900));
        assert_eq!(all.held_bytes(), 880);
        drop(greedy);
        assert!(other.grow(100, 900));
        assert_eq!((all.held_bytes(), client(1).held_bytes()), (480, 300));
        further.shrink(100);
        drop((further, other));
        assert_eq!(all.held_bytes(), 0);
        assert!(all.clients().is_empty(), "a client without charges is forgotten");
    }

    #[test]
    fn the_only_charge_of_a_client_gets_what_is_free_in_any_pieces_and_with_any_weight() {
        let all = Arc::new(MemoryBudget::default());
        for weight in [0.01, 1.0] {
            let client = all.of_client(ClientShare { number: 1, weight });
            let mut body = client.charge();
            assert!((0..100).all(|_| body.grow(10, 1000)), "{weight}");
            body.shrink(900);
            let mut prepared = client.charge();
            assert!(prepared.grow(350, 1000), "and what is made of it, while as much is free");
        }
    }

    #[test]
    fn a_weight_that_a_reload_has_changed_counts_at_once() {
        let all = Arc::new(MemoryBudget::default());
        let client = |weight| all.of_client(ClientShare { number: 1, weight });
        let (mut first, mut second) = (client(1.0).charge(), client(1.0).charge());
        assert!(first.grow(600, 900) && second.grow(100, 900));
        let _lighter = client(0.25);
        assert!(!second.grow(1, 900), "two times what is free");
        let _heavier = client(4.0);
        assert!(second.grow(150, 900));
    }

    proptest! {
        #[test]
        fn held_memory_is_the_sum_of_all_charges(
            steps in prop::collection::vec((0_usize..4, 0_usize..400, any::<bool>()), 0..60),
        ) {
            const MAX_BYTES: usize = 1000;
            let budget = Arc::new(MemoryBudget::default());
            let mut charges: Vec<Charge> = (0..4).map(|_| budget.charge()).collect();
            for (at, bytes, grows) in steps {
                let before = charges[at].bytes();
                match grows {
                    true => {
                        let fits = budget.held_bytes() + bytes <= MAX_BYTES;
                        prop_assert_eq!(charges[at].grow(bytes, MAX_BYTES), fits);
                        let grown = if fits { bytes } else { 0 };
                        prop_assert_eq!(charges[at].bytes(), before + grown);
                    }
                    false => {
                        charges[at].shrink(bytes);
                        prop_assert_eq!(charges[at].bytes(), before.saturating_sub(bytes));
                    }
                }
                let sum: usize = charges.iter().map(Charge::bytes).sum();
                prop_assert_eq!(budget.held_bytes(), sum);
            }
            drop(charges);
            prop_assert_eq!(budget.held_bytes(), 0);
        }
    }
}
