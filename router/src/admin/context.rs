//! The state that the handlers of the admin listener use.

use std::sync::Arc;

use axum::extract::FromRef;
use tokio::sync::Semaphore;

use crate::core::Core;
use crate::live::Live;
use crate::reload::Reload;
use splitrail_fleet::Fleet;

/// The state that all handlers share.
#[derive(Clone)]
pub struct Admin {
    /// The models and the accounts of requests.
    pub core: Arc<Core>,
    /// The workers, which operators may change.
    pub fleet: Arc<Fleet>,
    /// Reloads the configuration file.
    pub reload: Reload,
    /// The snapshots that operators watch.
    pub live: Arc<Live>,
    /// The permit to copy a worker's blocks out of the index, which takes tens of megabytes and
    /// locks the index.
    pub index_copy: Arc<Semaphore>,
}

impl Admin {
    /// The state that the handlers of one router share.
    pub fn new(core: &Arc<Core>, fleet: &Arc<Fleet>, reload: &Reload, live: &Arc<Live>) -> Self {
        Self {
            core: Arc::clone(core),
            fleet: Arc::clone(fleet),
            reload: reload.clone(),
            live: Arc::clone(live),
            index_copy: Arc::new(Semaphore::new(1)),
        }
    }
}

impl FromRef<Admin> for Arc<Core> {
    fn from_ref(admin: &Admin) -> Self {
        Arc::clone(&admin.core)
    }
}
