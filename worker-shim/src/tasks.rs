//! Owns the tasks that HTTP libraries start.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use hyper::rt::Executor;
use tokio::task::JoinSet;

/// The tasks that an HTTP library has started for a group of connections. Dropping this value
/// ends all of them, including tasks that wait for a peer that never reads.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTasks(Arc<Mutex<JoinSet<()>>>);

impl ConnectionTasks {
    /// The executor to pass to the library. It does not keep the tasks alive.
    pub(crate) fn executor(&self) -> ConnectionExecutor {
        ConnectionExecutor(Arc::downgrade(&self.0))
    }
}

/// Starts tasks in a [`ConnectionTasks`]. Drops new tasks unstarted once that is gone.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionExecutor(Weak<Mutex<JoinSet<()>>>);

impl<F> Executor<F> for ConnectionExecutor
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    fn execute(&self, task: F) {
        let Some(tasks) = self.0.upgrade() else { return };
        let mut tasks = tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            task.await;
        });
    }
}
