//! The streams of an HTTP/2 connection: tasks that end with the connection, or when a client does
//! not read what it requested.
//!
//! A stream whose window the client keeps closed blocks nothing else: no write waits, and the
//! connection makes progress. Such a stream is recognised by a reply's body that has yielded a
//! piece and is not polled for the next. The stream is reset, and the other streams of the
//! connection continue.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;

use hyper::rt::Executor;
use prometheus::IntCounter;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::Common;
use splitrail_client_connection::connection_activity::ConnectionActivity;
use splitrail_client_connection::pace::{Observation, RequiredPace, SlowReason, WaitTime};

thread_local! {
    /// The stream whose task is being polled on this thread.
    static CURRENT: RefCell<Option<Arc<BodyProgress>>> = const { RefCell::new(None) };
}

/// How much of a reply's body the client has taken.
#[derive(Debug)]
pub(super) struct BodyProgress {
    /// Whether the client has taken everything that was yielded.
    all: AtomicBool,
    /// Number of bytes yielded by the body.
    yielded_bytes: AtomicU64,
    /// When the call ends at the latest, even if its client takes nothing.
    deadline: OnceLock<Instant>,
}

impl BodyProgress {
    fn new() -> Arc<Self> {
        let (yielded_bytes, deadline) = Default::default();
        Arc::new(Self { all: AtomicBool::new(true), yielded_bytes, deadline })
    }

    /// The progress of the stream that is being polled, if there is one.
    pub(super) fn of_this_stream() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Resets the stream at this time if its client has not taken everything by then: the body,
    /// which is not polled meanwhile, cannot end the call.
    pub(super) fn end_at(&self, deadline: Instant) {
        self.deadline.get_or_init(|| deadline);
    }

    /// Notes that the body was polled for its next piece, so everything before was taken.
    pub(super) fn waits_for_body(&self) {
        self.all.store(true, Relaxed);
    }

    /// Notes that the body yielded bytes or its end.
    pub(super) fn note_yielded(&self, bytes: usize) {
        self.all.store(false, Relaxed);
        self.yielded_bytes.fetch_add(bytes as u64, Relaxed);
    }
}

/// Runs a connection's streams.
#[derive(Clone)]
pub(super) struct Streams {
    tasks: Arc<Mutex<JoinSet<()>>>,
    settings: Arc<StreamSettings>,
}

/// What the streams of a connection have in common.
struct StreamSettings {
    required_pace: RequiredPace,
    activity: Arc<ConnectionActivity>,
    /// Number of reset streams, by reason.
    stalled: IntCounter,
    too_slow: IntCounter,
}

impl Streams {
    /// Runs the streams of a connection. Streams that are reset are counted.
    pub(super) fn new(
        required_pace: RequiredPace,
        activity: Arc<ConnectionActivity>,
        common: &Common,
    ) -> Self {
        let counter = |reason| common.cut.with_label_values(&[common.listener, reason]);
        let (stalled, too_slow) = (counter("stream_stall"), counter("stream_pace"));
        let settings = Arc::new(StreamSettings { required_pace, activity, stalled, too_slow });
        Self { tasks: Arc::default(), settings }
    }

    /// Ends all streams.
    pub(super) fn end(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(read_in_time(stream, Arc::clone(&self.settings)));
    }
}

/// Polls a stream to its end, or drops it when its client is too slow: the client then sees a
/// reset.
async fn read_in_time(stream: impl Future<Output = ()>, settings: Arc<StreamSettings>) {
    let mut stream = pin!(stream);
    let taken = BodyProgress::new();
    let mut watch =
        StreamWatch { settings: &settings, waiting: WaitTime::default(), is_waiting: false };
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|context| {
        let current = CurrentStream::set(&taken);
        let polled = stream.as_mut().poll(context);
        drop(current);
        if polled.is_ready() {
            return polled;
        }
        loop {
            // Only a waiting stream has a timer and reads the clock.
            let Some((at, reason)) = watch.look(&taken) else { return Poll::Pending };
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
            if timer.deadline() > at {
                timer.as_mut().reset(at);
            }
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if Instant::now() >= at {
                settings.count(reason);
                return Poll::Ready(());
            }
            timer.as_mut().reset(at);
        }
    })
    .await;
}

impl StreamSettings {
    fn count(&self, reason: ResetReason) {
        match reason {
            ResetReason::Slow(SlowReason::Stalled) => self.stalled.inc(),
            ResetReason::Slow(SlowReason::TooSlow) => self.too_slow.inc(),
            // The call's own records say so.
            ResetReason::Deadline => {}
        }
    }
}

/// Why a stream is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResetReason {
    /// Its client is too slow.
    Slow(SlowReason),
    /// The call's deadline has passed.
    Deadline,
}

/// Marks a stream as the one that is polled on this thread, until it is dropped: also if the poll
/// panics.
struct CurrentStream(Option<Arc<BodyProgress>>);

impl CurrentStream {
    fn set(taken: &Arc<BodyProgress>) -> Self {
        Self(CURRENT.replace(Some(Arc::clone(taken))))
    }
}

impl Drop for CurrentStream {
    fn drop(&mut self) {
        CURRENT.replace(self.0.take());
    }
}

/// Measures for how long a stream's bytes have waited for the client.
struct StreamWatch<'a> {
    settings: &'a StreamSettings,
    waiting: WaitTime,
    is_waiting: bool,
}

impl StreamWatch<'_> {
    fn look(&mut self, taken: &BodyProgress) -> Option<(Instant, ResetReason)> {
        let waits = !taken.all.load(Relaxed);
        if std::mem::replace(&mut self.is_waiting, waits) != waits {
            match waits {
                true => self.settings.activity.stream_waits(),
                false => self.settings.activity.stream_continues(),
            }
        }
        let taken_bytes = taken.yielded_bytes.load(Relaxed);
        // The streams of a slow connection share the required pace.
        let seen =
            Observation { waits, taken_bytes, sharers: self.settings.activity.waiting_streams() };
        let slow = self.waiting.see(seen, &self.settings.required_pace, Instant::now);
        let slow = slow.map(|(at, slow)| (at, ResetReason::Slow(slow)));
        let deadline = taken.deadline.get().filter(|_| waits);
        let deadline = deadline.map(|at| (*at, ResetReason::Deadline));
        slow.into_iter().chain(deadline).min_by_key(|(at, _)| *at)
    }
}

impl Drop for StreamWatch<'_> {
    fn drop(&mut self) {
        if self.is_waiting {
            self.settings.activity.stream_continues();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_stream_is_the_current_one_until_its_poll_ends_also_in_a_panic() {
        let (outer, inner) = (BodyProgress::new(), BodyProgress::new());
        let is_current = |expected: Option<&Arc<BodyProgress>>| match expected {
            None => BodyProgress::of_this_stream().is_none(),
            Some(progress) => {
                BodyProgress::of_this_stream().is_some_and(|found| Arc::ptr_eq(&found, progress))
            }
        };
        let current = CurrentStream::set(&outer);
        let polled = catch_unwind(AssertUnwindSafe(|| {
            let _current = CurrentStream::set(&inner);
            assert!(is_current(Some(&inner)));
            panic!("in a poll");
        }));
        assert!(polled.is_err() && is_current(Some(&outer)));
        drop(current);
        assert!(is_current(None));
    }
}
