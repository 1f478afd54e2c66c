//! The tasks of one connection: they end with it, whatever they wait for.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use hyper::rt::Executor;
use tokio::task::JoinSet;

/// Owns the tasks that the HTTP library starts for a connection. A stream that nobody reads
/// would else live, with all that it has to send, for as long as the router lets it.
#[derive(Debug, Default)]
pub(super) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    pub(super) fn executor(&self) -> Starter {
        Starter(Arc::downgrade(&self.0))
    }
}

/// Starts them.
#[derive(Clone, Debug)]
pub(super) struct Starter(Weak<Mutex<JoinSet<()>>>);

impl<F> Executor<F> for Starter
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        // Without an owner the connection is over.
        if let Some(tasks) = self.0.upgrade() {
            let mut tasks = tasks.lock().unwrap_or_else(PoisonError::into_inner);
            while tasks.try_join_next().is_some() {}
            tasks.spawn(task);
        }
    }
}
