//! The tasks of a model that free hand-offs which no decode worker fetched.

use std::sync::{Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// Maximum number of concurrent releases; further hand-offs are freed when their lease ends.
const RELEASES_MAX: usize = 256;

/// The tasks that release hand-offs which were not fetched. Dropping this ends them.
#[derive(Default)]
pub struct Releases(Mutex<JoinSet<()>>);

impl Releases {
    /// Runs a release; returns `false` if too many run already.
    pub fn run(&self, release: impl Future<Output = ()> + Send + 'static) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let room = tasks.len() < RELEASES_MAX;
        if room {
            tasks.spawn_on(release, &runtime);
        }
        room
    }
}
