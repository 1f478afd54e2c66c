//! Ends the requests that are still running when a drain's grace ends.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio_util::sync::CancellationToken;

/// Parts that are waited for apart from each other: at least one for each of the threads that
/// serve, on any machine of today.
const PARTS: usize = 64;

/// A token that every request waits for. Who waits enters a list under a lock: each thread has
/// a list of its own, so that requests do not wait for each other there.
#[derive(Debug)]
pub struct Cut {
    all: CancellationToken,
    parts: Vec<CancellationToken>,
}

thread_local! {
    static PART: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % PARTS
    };
}

impl Default for Cut {
    fn default() -> Self {
        let all = CancellationToken::new();
        let parts = std::iter::repeat_with(|| all.child_token()).take(PARTS).collect();
        Self { all, parts }
    }
}

impl Cut {
    /// Ends all that wait for it, and all that will.
    pub fn cancel(&self) {
        self.all.cancel();
    }

    /// What a request on this thread waits for.
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
    async fn whoever_waits_on_whatever_thread_is_told() {
        let cut = Arc::new(Cut::default());
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
