//! Divides the cores among the work that is done off the reactor.

use std::sync::Arc;

use splitrail_api::error::{Error, ErrorKind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies of which a template may make more than this are long: they take some tens of milliseconds
/// or more.
pub(super) const LONG_BYTES: usize = 256 << 10;

/// The permits for work off the reactor.
pub struct Cores {
    /// The number of cores.
    count: usize,
    /// One permit per core for parsing and tokenising off the reactor.
    permits: Arc<Semaphore>,
    /// The permits that long bodies and replies may hold: half of all, so that short ones can overtake
    /// them.
    long_permits: Arc<Semaphore>,
    /// The turns of long replies, as many as there are long permits: all others do not wait before a
    /// request for such a permit.
    reply_turns: Arc<Semaphore>,
}

impl Cores {
    pub(super) fn new(count: usize) -> Self {
        let long = (count / 2).max(1);
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            count,
            permits: semaphore(count),
            long_permits: semaphore(long),
            reply_turns: semaphore(long),
        }
    }

    /// The number of permits that are free for long bodies.
    pub fn free_long_permits(&self) -> usize {
        self.long_permits.available_permits()
    }

    /// Whether more than half of the cores are free: work that can wait does not make requests wait.
    pub(crate) fn has_spare(&self) -> bool {
        self.permits.available_permits() > self.count / 2
    }

    /// Runs work whose time grows with `bytes` of a reply: at once if they are few, and otherwise off
    /// the reactor.
    ///
    /// # Errors
    /// If the router is stopping or the work panics.
    pub async fn run_sized<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        match bytes < LONG_BYTES {
            true => Ok(work()),
            // Boxed so that requests with short replies do not grow.
            false => Box::pin(self.run_in_turn(bytes, work)).await,
        }
    }

    async fn run_in_turn<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let turn = acquire(&self.reply_turns).await?;
        let in_turn = move || {
            let _turn = turn;
            work()
        };
        self.run_off_reactor(bytes, in_turn).await
    }

    /// Runs work whose time grows with `bytes` of a request on the blocking pool, once a permit for
    /// such work is free.
    ///
    /// # Errors
    /// If the router is stopping or the work panics.
    pub async fn run_off_reactor<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        // The permits move into the work: when a client leaves, the core is still busy with its
        // request.
        let long = match bytes > LONG_BYTES {
            true => Some(acquire(&self.long_permits).await?),
            false => None,
        };
        let permits = (acquire(&self.permits).await?, long);
        let with_permits = move || {
            let _permits = permits;
            work()
        };
        let defect = |_| Error::new(ErrorKind::Internal, "a request could not be prepared");
        tokio::task::spawn_blocking(with_permits).await.map_err(defect)
    }
}

async fn acquire(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Error> {
    let permit = Arc::clone(semaphore).acquire_owned().await;
    permit.map_err(|_| Error::new(ErrorKind::Internal, "the router is stopping"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn a_long_request_does_not_wait_behind_long_replies() {
        const BYTES: usize = 2 * LONG_BYTES;
        const REPLIES: usize = 20;
        let cores = Cores::new(2);
        let (begin, begun) = mpsc::sync_channel(REPLIES);
        let (done, order) = mpsc::sync_channel(REPLIES + 1);
        let begun = Arc::new(std::sync::Mutex::new(begun));
        let reply = |_| {
            let (begun, done) = (Arc::clone(&begun), done.clone());
            cores.run_sized(BYTES, move || {
                begun.lock().unwrap().recv().unwrap();
                done.send("reply").unwrap();
            })
        };
        let request = async {
            // All replies wait by now.
            tokio::task::yield_now().await;
            let done = done.clone();
            let work = cores.run_off_reactor(BYTES, move || done.send("request").unwrap());
            let release = async { (0..REPLIES).for_each(|_| begin.send(()).unwrap()) };
            tokio::join!(work, release).0
        };
        let (replies, request) = tokio::join!(join_all((0..REPLIES).map(reply)), request);
        request.unwrap();
        assert!(replies.into_iter().all(|reply| reply.is_ok()));
        let place = order.try_iter().position(|done| done == "request").unwrap();
        assert!(place <= 2, "after {place} replies");
    }
}
