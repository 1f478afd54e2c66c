//! Ends the requests that are still running when a drain's grace ends.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio_util::sync::CancellationToken;

/// Number of child tokens: at least one for each thread that serves, on any current machine.
const CHILD_TOKENS: usize = 64;

/// A token that is cancelled to end all requests. Waiting for a token enters a list under a lock:
/// each thread has a child token of its own, so that requests do not wait for each other.
#[derive(Debug)]
pub struct AbortToken {
    all: CancellationToken,
    parts: Vec<CancellationToken>,
}

thread_local! {
    static PART: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % CHILD_TOKENS
    };
}

impl Default for AbortToken {
    fn default() -> Self {
        let all = CancellationToken::new();
        let parts = std::iter::repeat_with(|| all.child_token()).take(CHILD_TOKENS).collect();
        Self { all, parts }
    }
}

impl AbortToken {
    /// Ends all requests that wait for the token, now or later.
    pub fn cancel(&self) {
        self.all.cancel();
    }

    /// The token for requests on this thread.
    pub fn token(&self) -> &CancellationToken {
        &self.parts[PART.with(|part| *part)]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn waiters_on_all_threads_are_woken_by_a_cancellation() {
        let cut = Arc::new(AbortToken::default());
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let cut = Arc::clone(&cut);
                std::thread::spawn(move || cut.token().clone().cancelled_owned())
            })
            .collect();
        cut.cancel();
        for thread in waiting {
            thread.join().unwrap().await;
        }
        assert!(cut.token().is_cancelled());
    }
}
