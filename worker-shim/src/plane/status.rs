//! How the shim stands with the broker.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// How it stands, as a handle.
#[derive(Clone, Debug, Default)]
pub struct Status {
    shown: Arc<Mutex<PlaneStatus>>,
    connected: Arc<Mutex<Option<watch::Receiver<bool>>>>,
}

/// How it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaneStatus {
    /// Whether the broker is there.
    pub connected: bool,
    /// The last change that is in the stream.
    pub published_sequence: u64,
    /// Changes that are not there yet.
    pub lag: u64,
    /// Snapshots that were stored.
    pub snapshots: u64,
    /// How often changes were lost on this side, so that only a snapshot leads on.
    pub losses: u64,
    /// Attempts that the broker did not take.
    pub failures: u64,
    /// What went wrong last.
    pub last_error: Option<String>,
}

impl Status {
    /// How it stands now.
    #[must_use]
    pub fn get(&self) -> PlaneStatus {
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        let connected = connected.as_ref().is_some_and(|connected| *connected.borrow());
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        PlaneStatus { connected, ..shown.clone() }
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut PlaneStatus)) {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn connected(&self, connected: watch::Receiver<bool>) {
        *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = Some(connected);
    }
}
