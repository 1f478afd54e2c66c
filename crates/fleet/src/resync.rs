//! Asks the task that follows a worker's KV events to read all of them again.

use tokio::sync::watch;

/// A worker's wish to be read anew: one side asks, the other one follows its events.
#[derive(Debug)]
pub struct Resync(watch::Sender<Wish>);

#[derive(Clone, Copy, Debug, Default)]
struct Wish {
    /// How many were there.
    number: u64,
    /// Why, as in `splitrail_index_resyncs_total`.
    reason: &'static str,
}

/// Hears of the wishes made since it was made itself.
#[derive(Debug)]
pub struct ResyncWishes(watch::Receiver<Wish>);

impl Default for Resync {
    fn default() -> Self {
        Self(watch::Sender::new(Wish::default()))
    }
}

impl Resync {
    /// Asks for it. Wishes that nobody has heard yet become one.
    pub fn request(&self, reason: &'static str) {
        self.0.send_modify(|wish| *wish = Wish { number: wish.number + 1, reason });
    }

    /// Wishes from now on.
    pub fn wishes(&self) -> ResyncWishes {
        ResyncWishes(self.0.subscribe())
    }
}

impl ResyncWishes {
    /// Waits for the next wish; says why. Never, once the worker is gone.
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
