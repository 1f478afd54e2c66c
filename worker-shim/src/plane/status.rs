//! The state of the event plane.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// A handle on the state of the event plane. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct SharedPlaneStatus {
    shown: Arc<Mutex<PlaneStatus>>,
    connected: Arc<Mutex<Option<watch::Receiver<bool>>>>,
}

/// The state of the event plane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaneStatus {
    /// Whether the broker is connected.
    pub connected: bool,
    /// The number of the last published change.
    pub published_sequence: u64,
    /// Changes that are not published yet.
    pub lag: u64,
    /// Snapshots that were stored.
    pub snapshots: u64,
    /// How often changes were lost before they were published, and replaced by a snapshot.
    pub losses: u64,
    /// Operations at the broker that failed.
    pub failures: u64,
    /// The last error.
    pub last_error: Option<String>,
}

impl SharedPlaneStatus {
    /// The current state.
    #[must_use]
    pub fn get(&self) -> PlaneStatus {
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        let connected = connected.as_ref().is_some_and(|connected| *connected.borrow());
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        PlaneStatus { connected, ..shown.clone() }
    }
}

#[cfg(feature = "nats")]
impl SharedPlaneStatus {
    pub(super) fn update(&self, change: impl FnOnce(&mut PlaneStatus)) {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn connected(&self, connected: watch::Receiver<bool>) {
        *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = Some(connected);
    }
}
