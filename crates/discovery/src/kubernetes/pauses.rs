//! Pauses after errors of a watch.
//!
//! The watcher's own pauses begin anew with each attempt to list, because that is an event: a list
//! that is refused would be asked for every second.

use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt};
use kube::runtime::watcher::{self, Event};

/// The first pause; each further error in a row doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause, and so the time after which an API server that is back is noticed.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// The events, with a pause after each error.
pub(super) fn with_pauses<K: Send + 'static>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static {
    stream::unfold((Box::pin(events), 0, false), |(mut events, errors, failed)| async move {
        if failed {
            tokio::time::sleep(pause(errors, rand::random())).await;
        }
        let event = events.next().await?;
        let (errors, failed) = (errors_after(errors, &event), event.is_err());
        Some((event, (events, errors, failed)))
    })
}

/// The pause after this many errors in a row; `share` is a random number from 0 to 1, so that
/// routers do not ask all at once.
fn pause(errors: u32, share: f64) -> Duration {
    let doubled = 2_u32.saturating_pow(errors.saturating_sub(1));
    PAUSE_MIN.saturating_mul(doubled).min(PAUSE_MAX).mul_f64(1.0 - share / 2.0)
}

/// The number of errors in a row once `event` has arrived.
fn errors_after<K>(errors: u32, event: &watcher::Result<Event<K>>) -> u32 {
    match event {
        // Begins each attempt to list.
        Ok(Event::Init) => errors,
        Ok(_) => 0,
        // The API server answers, and can be asked for a list.
        Err(watcher::Error::WatchError(status)) if status.code == 410 => 1,
        Err(_) => errors.saturating_add(1),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kube::core::Status;
    use tokio::time::Instant;

    use super::*;

    fn error(code: u16) -> watcher::Result<Event<()>> {
        let status = Status { code, ..Status::default() };
        Err(watcher::Error::WatchError(Box::new(status)))
    }

    /// The longest possible pauses in seconds before each event but the first.
    async fn waits(events: Vec<watcher::Result<Event<()>>>) -> Vec<u64> {
        let mut events = Box::pin(with_pauses(stream::iter(events)));
        let mut waits = Vec::new();
        let mut last = Instant::now();
        while events.next().await.is_some() {
            let now = Instant::now();
            // A pause is cut by at most half.
            waits.push((now - last).as_secs_f64().ceil() as u64);
            last = now;
        }
        waits.remove(0);
        waits
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_is_refused_is_asked_for_ever_more_rarely() {
        let mut events = Vec::new();
        for _ in 0..8 {
            events.extend([Ok(Event::Init), error(403)]);
        }
        let waits = waits(events).await;
        for (index, wait) in waits.iter().enumerate() {
            let errors = u32::try_from(index.div_ceil(2)).unwrap();
            // An attempt follows at once what begins it.
            let longest = if index % 2 == 0 { 0 } else { (1_u64 << (errors - 1)).min(10) };
            assert!(*wait <= longest && *wait >= longest / 2, "{index}: {waits:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_of_the_api_server_ends_the_long_pauses() {
        let refused = || (0..6).map(|_| error(500));
        let events = refused().chain([error(410), Ok(Event::Init), Ok(Event::InitDone)]);
        let waits = waits(events.chain([error(500), Ok(Event::Init)]).collect()).await;
        assert!(waits[5] >= 5, "{waits:?}");
        assert_eq!(waits[6..], [1, 0, 0, 1], "{waits:?}");
    }

    #[test]
    fn a_pause_never_passes_the_longest() {
        assert_eq!(pause(u32::MAX, 0.0), PAUSE_MAX);
        assert_eq!(pause(1, 0.0), PAUSE_MIN);
        assert_eq!(pause(1, 1.0), PAUSE_MIN / 2);
    }
}
