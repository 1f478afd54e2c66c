//! Events in batches: each list of workers is compared as a whole, so that a thousand events must
//! not become a thousand lists.

use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt};
use tokio::time::{Instant, timeout_at};

/// Minimum time between two batches. An event after a longer silence does not wait.
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of events in a batch.
const EVENTS_MAX: usize = 1024;

/// The events, in batches of at least one.
pub(super) fn gather<E: Send + 'static>(
    events: impl Stream<Item = E> + Send + 'static,
) -> impl Stream<Item = Vec<E>> + Send + 'static {
    stream::unfold((Box::pin(events), Instant::now()), |(mut events, due)| async move {
        let mut batch = vec![events.next().await?];
        while batch.len() < EVENTS_MAX {
            match timeout_at(due, events.next()).await {
                Ok(Some(event)) => batch.push(event),
                Ok(None) | Err(_) => break,
            }
        }
        Some((batch, (events, Instant::now() + INTERVAL)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_event_does_not_wait_and_many_arrive_together() {
        let trickle = stream::iter(0..100).then(async |number| {
            if number > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            number
        });
        let mut batches = Box::pin(gather(trickle));
        let began = Instant::now();
        assert_eq!(batches.next().await, Some(vec![0]));
        assert_eq!(began.elapsed(), Duration::ZERO);
        let rest: Vec<_> = batches.collect().await;
        assert!(rest.len() <= 11, "{rest:?}");
        assert_eq!(rest.concat(), (1..100).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_after_a_silence_does_not_wait() {
        let apart = stream::iter(0..3).then(async |number| {
            tokio::time::sleep(INTERVAL * 2).await;
            number
        });
        let began = Instant::now();
        let batches: Vec<_> = gather(apart).map(|batch| (batch, began.elapsed())).collect().await;
        let expected = [1_u32, 2, 3].map(|index| (vec![index - 1], INTERVAL * 2 * index));
        assert_eq!(batches, expected);
    }
}
