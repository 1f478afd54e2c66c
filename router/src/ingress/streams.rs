//! The streams of an HTTP/2 connection: tasks that end with the connection, or when a client does not
//! read what it asked for.
//!
//! A stream whose window the client keeps closed blocks nothing else: no write waits, and the
//! connection makes progress. Such a stream is recognised by an answer's body that has given a piece and is not
//! polled for the next. The stream is reset, and the other streams of the connection go on.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use hyper::rt::Executor;
use prometheus::IntCounter;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::Common;
use super::pace::{Seen, Slow, Taking, Waiting};
use super::pulse::Pulse;

thread_local! {
    /// The stream whose task is being polled on this thread.
    static CURRENT: RefCell<Option<Arc<Taken>>> = const { RefCell::new(None) };
}

/// What the client has taken of what the answer's body gave.
#[derive(Debug)]
pub(super) struct Taken {
    /// Whether it is all.
    all: AtomicBool,
    /// Bytes given.
    given_bytes: AtomicU64,
}

impl Taken {
    fn new() -> Arc<Self> {
        Arc::new(Self { all: AtomicBool::new(true), given_bytes: AtomicU64::new(0) })
    }

    /// Of the stream that is being polled, if one is.
    pub(super) fn of_this_stream() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// The body was asked for its next piece: what it gave before was taken.
    pub(super) fn waits_for_body(&self) {
        self.all.store(true, Relaxed);
    }

    /// The body gave so many bytes, or its end.
    pub(super) fn gave(&self, bytes: usize) {
        self.all.store(false, Relaxed);
        self.given_bytes.fetch_add(bytes as u64, Relaxed);
    }
}

/// Runs a connection's streams.
#[derive(Clone)]
pub(super) struct Streams {
    tasks: Arc<Mutex<JoinSet<()>>>,
    terms: Arc<Terms>,
}

/// What the streams of a connection have in common.
struct Terms {
    taking: Taking,
    pulse: Arc<Pulse>,
    /// Streams that were reset, by what was wrong.
    stalled: IntCounter,
    dribbling: IntCounter,
}

impl Streams {
    /// Streams of a connection. Those that are given up are counted.
    pub(super) fn new(taking: Taking, pulse: Arc<Pulse>, common: &Common) -> Self {
        let counter = |reason| common.cut.with_label_values(&[common.listener, reason]);
        let (stalled, dribbling) = (counter("stream_stall"), counter("stream_pace"));
        let terms = Arc::new(Terms { taking, pulse, stalled, dribbling });
        Self { tasks: Arc::default(), terms }
    }

    /// Ends them all.
    pub(super) fn end(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(taken_in_time(stream, Arc::clone(&self.terms)));
    }
}

/// Polls a stream to its end, or drops it: its client then sees a reset.
async fn taken_in_time(stream: impl Future<Output = ()>, terms: Arc<Terms>) {
    let mut stream = pin!(stream);
    let taken = Taken::new();
    let mut watch = StreamWatch { terms: &terms, waiting: Waiting::default(), is_waiting: false };
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|context| {
        let outer = CURRENT.replace(Some(Arc::clone(&taken)));
        let polled = stream.as_mut().poll(context);
        CURRENT.replace(outer);
        if polled.is_ready() {
            return polled;
        }
        loop {
            // Only a stream that waits has a timer, and only it looks at the clock.
            let Some((at, slow)) = watch.look(&taken) else { return Poll::Pending };
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
            if timer.deadline() > at {
                timer.as_mut().reset(at);
            }
            if timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if Instant::now() >= at {
                terms.count(slow);
                return Poll::Ready(());
            }
            timer.as_mut().reset(at);
        }
    })
    .await;
}

impl Terms {
    fn count(&self, slow: Slow) {
        match slow {
            Slow::Stalled => self.stalled.inc(),
            Slow::Dribbling => self.dribbling.inc(),
        }
    }
}

/// Sees for how long what a stream gives has waited for its client.
struct StreamWatch<'a> {
    terms: &'a Terms,
    waiting: Waiting,
    is_waiting: bool,
}

impl StreamWatch<'_> {
    fn look(&mut self, taken: &Taken) -> Option<(Instant, Slow)> {
        let waits = !taken.all.load(Relaxed);
        if std::mem::replace(&mut self.is_waiting, waits) != waits {
            match waits {
                true => self.terms.pulse.stream_waits(),
                false => self.terms.pulse.stream_goes_on(),
            }
        }
        let taken_bytes = taken.given_bytes.load(Relaxed);
        // The streams of a slow connection share what it takes.
        let seen = Seen { waits, taken_bytes, sharers: self.terms.pulse.waiting_streams() };
        self.waiting.see(seen, &self.terms.taking, Instant::now)
    }
}

impl Drop for StreamWatch<'_> {
    fn drop(&mut self) {
        if self.is_waiting {
            self.terms.pulse.stream_goes_on();
        }
    }
}
