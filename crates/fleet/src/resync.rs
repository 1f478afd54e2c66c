//! Asks the task that follows a worker's KV events to read all of them again.

use tokio::sync::watch;

/// Requests to read a worker's KV events again: one side makes them, the other side follows the
/// events.
#[derive(Debug)]
pub struct Resync(watch::Sender<Wish>);

/// A request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The reason, as in `splitrail_index_resyncs_total`.
    pub reason: &'static str,
    /// Whether the events are read again even if the engine does not have all of them any more.
    pub is_last_resort: bool,
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
    /// Requests a resynchronisation. Of requests that have not been received yet, the last one counts.
    pub fn request(&self, wish: Wish) {
        self.0.send_replace(wish);
    }

    /// A receiver for requests from now on.
    pub fn wishes(&self) -> ResyncWishes {
        ResyncWishes(self.0.subscribe())
    }
}

impl ResyncWishes {
    /// Waits for the next request. Never returns once the worker is gone.
    pub async fn next(&mut self) -> Wish {
        match self.0.changed().await {
            Ok(()) => *self.0.borrow_and_update(),
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_wishes_that_come_later_are_heard() {
        let wish = |reason| Wish { reason, is_last_resort: false };
        let resync = Resync::default();
        resync.request(wish("before"));
        let mut wishes = resync.wishes();
        resync.request(wish("drift"));
        assert_eq!(wishes.next().await, wish("drift"));
        resync.request(wish("drift"));
        assert_eq!(wishes.next().await, wish("drift"));
    }
}
