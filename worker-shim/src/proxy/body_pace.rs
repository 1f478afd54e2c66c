//! How slowly a client may send the body of a request, which takes a place among all requests.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// The rate in bytes per second at which the bytes of a body allow further time.
const MIN_BYTES_PER_S: u64 = 1024;

/// Why a request's body ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestBodyError {
    /// The client has disconnected, or the framing is invalid.
    #[error(transparent)]
    Client(#[from] hyper::Error),
    /// The client sent the body too slowly.
    #[error("the body arrived too slowly")]
    TooSlow,
}

/// Measures for how long a client is waited for. The time for which the engine reads nothing does
/// not count.
#[derive(Debug)]
pub(super) struct BodyPace {
    /// The time that is allowed before the first byte.
    grace: Duration,
    bytes: u64,
    /// The time of all waits that have ended.
    waited: Duration,
    /// Since when the client is waited for, and the timer; `None` while it is not waited for.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl BodyPace {
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, bytes: 0, waited: Duration::ZERO, waiting: None }
    }

    /// Counts bytes that have arrived.
    pub(super) fn add(&mut self, bytes: usize) {
        if let Some((since, _)) = self.waiting.take() {
            self.waited += since.elapsed();
        }
        self.bytes += bytes as u64;
    }

    /// Waits for the client. Ready once it is too slow.
    pub(super) fn poll_wait(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let allowed = self.grace + Duration::from_secs(self.bytes / MIN_BYTES_PER_S);
        let left = allowed.saturating_sub(self.waited);
        let (_, timer) = self.waiting.get_or_insert_with(|| {
            let now = Instant::now();
            (now, Box::pin(sleep_until(now + left)))
        });
        timer.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{sleep, timeout};

    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// Waits for this long, then counts bytes. Whether the client was in time.
    async fn is_in_time(pace: &mut BodyPace, wait: Duration, bytes: usize) -> bool {
        let too_slow = timeout(wait, poll_fn(|context| pace.poll_wait(context))).await;
        pace.add(bytes);
        too_slow.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_single_bytes_is_given_up_after_the_grace() {
        let mut pace = BodyPace::new(30 * S);
        for _ in 0..29 {
            assert!(is_in_time(&mut pace, S, 1).await);
        }
        assert!(!is_in_time(&mut pace, 2 * S, 1).await);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_allow_further_time_and_the_engines_pauses_do_not_count() {
        let mut pace = BodyPace::new(2 * S);
        for _ in 0..100 {
            assert!(is_in_time(&mut pace, S, 1024).await);
            sleep(1000 * S).await;
        }
        assert!(is_in_time(&mut pace, S, 0).await);
        assert!(!is_in_time(&mut pace, 2 * S, 0).await);
    }
}
