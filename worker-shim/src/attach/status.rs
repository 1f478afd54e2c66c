//! How each router stands.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// How all routers stand, as a handle.
#[derive(Clone, Debug, Default)]
pub struct Status {
    routers: Arc<Mutex<BTreeMap<SocketAddr, RouterStatus>>>,
}

/// How one router stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterStatus {
    /// The configured address that it was found under.
    pub name: String,
    /// Where it is.
    pub address: SocketAddr,
    /// What is being done.
    pub stage: Stage,
    /// Its identity, once it has said it.
    pub router_id: String,
    /// The last change that it was sent.
    pub sent_sequence: u64,
    /// The last change that it has in its index.
    pub acked_sequence: u64,
    /// Copies of everything that it was sent.
    pub snapshots: u64,
    /// How often it was connected to.
    pub attached: u64,
    /// Why the last stream ended, or did not begin.
    pub last_error: Option<String>,
}

/// What is being done about a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It cannot be reached, or was not tried yet.
    Connecting,
    /// It said no, or is not acceptable: it is tried again seldom.
    Refused,
    /// Another address leads to the same router.
    Duplicate,
    /// It gets a copy of everything.
    Snapshot,
    /// It gets changes as they come.
    Live,
}

impl Stage {
    /// The name used in metrics and status pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Refused => "refused",
            Self::Duplicate => "duplicate",
            Self::Snapshot => "snapshot",
            Self::Live => "live",
        }
    }
}

impl RouterStatus {
    /// Changes that it was sent and has not said to have in its index.
    pub fn lag(&self) -> u64 {
        self.sent_sequence.saturating_sub(self.acked_sequence)
    }
}

impl Status {
    /// All routers, by address.
    pub fn routers(&self) -> Vec<RouterStatus> {
        let routers = self.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.values().cloned().collect()
    }

    /// The entry of a router, for as long as it is kept.
    pub(super) fn entry(&self, name: String, address: SocketAddr) -> Entry {
        let new = RouterStatus {
            name,
            address,
            stage: Stage::Connecting,
            router_id: String::new(),
            sent_sequence: 0,
            acked_sequence: 0,
            snapshots: 0,
            attached: 0,
            last_error: None,
        };
        self.routers.lock().unwrap_or_else(PoisonError::into_inner).insert(address, new);
        Entry { status: self.clone(), address }
    }
}

/// One router's entry.
#[derive(Debug)]
pub(super) struct Entry {
    status: Status,
    address: SocketAddr,
}

impl Entry {
    pub(super) fn update(&self, change: impl FnOnce(&mut RouterStatus)) {
        let mut routers = self.status.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.get_mut(&self.address).map(change);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut routers = self.status.routers.lock().unwrap_or_else(PoisonError::into_inner);
        routers.remove(&self.address);
    }
}
