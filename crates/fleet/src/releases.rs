//! The tasks that free what engines keep for requests that have ended: hand-offs which no decode worker
//! fetched, and decode legs whose pair was given up.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Maximum number of concurrent releases of hand-offs; further hand-offs are freed when their lease
/// ends.
const RELEASES_MAX: usize = 256;

/// Releases that run. Dropping this ends them.
#[derive(Default)]
pub struct Releases(Mutex<JoinSet<()>>);

impl Releases {
    /// Runs a release of a hand-off; returns `false` if too many run already.
    pub fn run(&self, release: impl Future<Output = ()> + Send + 'static) -> bool {
        self.run_among(RELEASES_MAX, release)
    }

    /// Runs a release, unless `max` run already. Returns whether it runs; it is dropped otherwise.
    pub fn run_among(
        &self,
        max: usize,
        release: impl Future<Output = ()> + Send + 'static,
    ) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        let room = tasks.len() < max;
        if room {
            tasks.spawn_on(release, &runtime);
        }
        room
    }

    /// Waits until no release runs, for a router that stops. Those that still run at `until` are
    /// dropped.
    pub async fn finish(&self, until: Instant) {
        loop {
            let mut tasks = std::mem::take(&mut *self.tasks());
            if tasks.is_empty() {
                return;
            }
            let all = async { while tasks.join_next().await.is_some() {} };
            if timeout_at(until, all).await.is_err() {
                tasks.shutdown().await;
            }
        }
    }

    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
