//! Whose the tasks of HTTP connections are.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::task::JoinSet;

/// Tasks that end when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    /// For libraries that start tasks. It does not keep them alive.
    pub(super) fn executor(&self) -> Executor {
        Executor(Arc::downgrade(&self.0))
    }
}

/// Starts tasks for [`Tasks`]; does nothing once that is dropped.
#[derive(Clone, Debug)]
pub(super) struct Executor(Weak<Mutex<JoinSet<()>>>);

impl<F> hyper::rt::Executor<F> for Executor
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
