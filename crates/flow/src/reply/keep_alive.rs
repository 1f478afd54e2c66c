//! Keeps the connection of a client open while engines work and no event goes out: proxies and
//! clients close connections on which nothing moves.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{self, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use splitrail_engine::dialect::Dialect;
use splitrail_engine_client::{Timer, Timers};
use tokio::time::Instant;

/// While no leg has been sent, as in the queue, the status of a reply is still open. It is kept open
/// for this many intervals: a refusal by status is of more use to a client than an error event.
const UNSENT_INTERVALS: u32 = 3;

/// What legs show of their work before the reply begins.
#[derive(Debug, Default)]
pub struct LegActivity {
    /// When the first leg was sent.
    first_sent: OnceLock<Instant>,
    /// The last comment of an engine that was not passed on.
    comment: Mutex<Option<Bytes>>,
}

impl LegActivity {
    /// Notes that a leg is sent.
    pub(crate) fn leg_sent(&self) {
        self.first_sent.get_or_init(Instant::now);
    }

    /// Notes that an engine keeps its connection open by this comment, or event without content.
    pub(crate) fn note_comment(&self, comment: Bytes) {
        *self.comment.lock().unwrap_or_else(PoisonError::into_inner) = Some(comment);
    }

    fn take_comment(&self) -> Option<Bytes> {
        self.comment.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Says when a comment is due that keeps a client's connection open. All methods are called by the
/// task that runs the legs.
#[derive(Debug)]
pub struct KeepAlive {
    interval: Duration,
    activity: Arc<LegActivity>,
    dialect: Dialect,
    /// When something went out last; before that, when the wait began.
    last: Instant,
    /// Whether the head of the reply has gone out.
    is_replied: bool,
    timer: Timer,
}

impl KeepAlive {
    /// For a request whose legs begin now, and a silence of at most this long.
    pub fn new(
        activity: &Arc<LegActivity>,
        interval: Duration,
        dialect: Dialect,
        timers: &Arc<Timers>,
    ) -> Self {
        let (activity, timer) = (Arc::clone(activity), timers.of(interval));
        Self { interval, activity, dialect, last: Instant::now(), is_replied: false, timer }
    }

    /// Waits for `begun`, but only until the head of the reply must go out with a comment, which
    /// [`poll`](Self::poll) then returns: `None`.
    pub async fn bound<F: Future>(&mut self, mut begun: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|context| match begun.as_mut().poll(context) {
            Poll::Ready(begun) => {
                // What has come together with an event is not needed.
                self.activity.take_comment();
                self.event_sent();
                Poll::Ready(Some(begun))
            }
            Poll::Pending => {
                let comment = ready!(self.poll(context));
                self.activity.note_comment(comment);
                Poll::Ready(None)
            }
        })
        .await
    }

    /// Notes that the head of the reply goes out, or an event.
    pub fn event_sent(&mut self) {
        self.is_replied = true;
        self.last = Instant::now();
    }

    /// The lines of the next comment, once one is due.
    pub fn poll(&mut self, context: &mut task::Context<'_>) -> Poll<Bytes> {
        let comment = match self.activity.take_comment() {
            Some(comment) => comment,
            None => {
                ready!(self.timer.poll_at(self.due(), context));
                Bytes::from_static(match self.dialect {
                    Dialect::Chunks | Dialect::Responses => b": keep-alive",
                    Dialect::Messages => b"event: ping\ndata: {\"type\": \"ping\"}",
                })
            }
        };
        self.event_sent();
        Poll::Ready(comment)
    }

    fn due(&self) -> Instant {
        match self.activity.first_sent.get() {
            _ if self.is_replied => self.last + self.interval,
            Some(sent) => (*sent + self.interval).min(self.unsent_due()),
            None => self.unsent_due(),
        }
    }

    fn unsent_due(&self) -> Instant {
        self.last + self.interval * UNSENT_INTERVALS
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(15);

    fn keep_alive(dialect: Dialect) -> KeepAlive {
        KeepAlive::new(&Arc::default(), INTERVAL, dialect, &Arc::default())
    }

    async fn next(keep_alive: &mut KeepAlive) -> (Duration, Bytes) {
        let since = Instant::now();
        let comment = poll_fn(|context| keep_alive.poll(context)).await;
        (since.elapsed(), comment)
    }

    #[tokio::test(start_paused = true)]
    async fn the_head_waits_longer_while_no_leg_is_sent() {
        for (sent_after, head_after) in [
            (Some(Duration::ZERO), INTERVAL),
            (Some(Duration::from_secs(10)), Duration::from_secs(25)),
            (Some(Duration::from_secs(40)), INTERVAL * 3),
            (None, INTERVAL * 3),
        ] {
            let mut keep_alive = keep_alive(Dialect::Chunks);
            let since = Instant::now();
            let activity = Arc::clone(&keep_alive.activity);
            let mut begun = pin!(async {
                if let Some(after) = sent_after {
                    tokio::time::sleep(after).await;
                    activity.leg_sent();
                }
                pending::<()>().await;
            });
            assert!(keep_alive.bound(begun.as_mut()).await.is_none());
            assert_eq!(since.elapsed(), head_after, "{sent_after:?}");
            assert_eq!(next(&mut keep_alive).await.0, Duration::ZERO, "the head has a comment");
            assert_eq!(next(&mut keep_alive).await.0, INTERVAL);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn comments_are_due_only_in_silence_and_those_of_engines_at_once() {
        let mut messages = keep_alive(Dialect::Messages);
        messages.event_sent();
        tokio::time::sleep(Duration::from_secs(10)).await;
        messages.event_sent();
        let (after, comment) = next(&mut messages).await;
        assert_eq!(after, INTERVAL);
        assert!(comment.starts_with(b"event: ping\n"));
        tokio::time::sleep(Duration::from_secs(10)).await;
        messages.activity.note_comment(Bytes::from_static(b": working"));
        assert_eq!(next(&mut messages).await, (Duration::ZERO, Bytes::from_static(b": working")));
        assert_eq!(next(&mut messages).await.0, INTERVAL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_that_begins_in_time_decides_its_status() {
        let mut keep_alive = keep_alive(Dialect::Chunks);
        keep_alive.activity.leg_sent();
        let mut begun = pin!(tokio::time::sleep(INTERVAL - Duration::from_secs(1)));
        assert!(keep_alive.bound(begun.as_mut()).await.is_some());
    }
}
