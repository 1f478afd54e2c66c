//! Asks the task that follows a worker's KV events to read all of them again.

use tokio::sync::watch;

/// Requests to read a worker's KV events again: one side makes them, the other side follows the
/// events.
#[derive(Debug)]
pub struct Resync(watch::Sender<Wish>);

#[derive(Clone, Copy, Debug, Default)]
struct Wish {
    /// The number of requests so far.
    number: u64,
    /// The reason, as in `splitrail_index_resyncs_total`.
    reason: &'static str,
}

/// Receives the requests that are made after its creation.
#[derive(Debug)]
pub struct ResyncWishes(watch::Receiver<Wish>);

impl Default for Resync {
    fn default() -> Self {
        Self(watch::Sender::new(Wish::default()))
    }
}

impl Resync {
    /// Requests a resynchronisation. Requests that have not been received yet are merged.
    pub fn request(&self, reason: &'static str) {
        self.0.send_modify(|wish| *wish = Wish { number: wish.number + 1, reason });
    }

    /// A receiver for requests from now on.
    pub fn wishes(&self) -> ResyncWishes {
        ResyncWishes(self.0.subscribe())
    }
}

impl ResyncWishes {
    /// Waits for the next request and returns its reason. Never returns once the worker is gone.
    pub async fn next(&mut self) -> &'static str {
        match self.0.changed().await {
            Ok(()) => self.0.borrow_and_update().reason,
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_wishes_that_come_later_are_heard() {
        let resync = Resync::default();
        resync.request("before");
        let mut wishes = resync.wishes();
        resync.request("drift");
        assert_eq!(wishes.next().await, "drift");
        resync.request("again");
        assert_eq!(wishes.next().await, "again");
    }
}
