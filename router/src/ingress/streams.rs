//! The streams of an HTTP/2 connection: tasks that end with it, or when a client does not
//! take what it asked for.
//!
//! A stream whose window the client leaves shut blocks nothing else: no write waits, and the
//! connection looks well. What tells is that the answer's body has given a piece and is not
//! asked for the next. Such a stream is reset, and the others of its connection go on.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use hyper::rt::Executor;
use prometheus::IntCounter;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep_until};

thread_local! {
    /// The stream whose task is being polled on this thread.
    static CURRENT: RefCell<Option<Arc<Taken>>> = const { RefCell::new(None) };
}

/// Whether the client has taken all that the answer's body gave.
#[derive(Debug)]
pub(super) struct Taken {
    all: AtomicBool,
    /// Pieces given: tells one that is not taken from the next.
    pieces: AtomicU32,
}

impl Taken {
    fn new() -> Arc<Self> {
        Arc::new(Self { all: AtomicBool::new(true), pieces: AtomicU32::new(0) })
    }

    /// Of the stream that is being polled, if one is.
    pub(super) fn of_this_stream() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// The body was asked, and either waits for its next piece, or gave one.
    pub(super) fn set(&self, all: bool) {
        self.all.store(all, Relaxed);
        if !all {
            self.pieces.fetch_add(1, Relaxed);
        }
    }

    /// The piece that is not taken.
    fn waiting(&self) -> Option<u32> {
        (!self.all.load(Relaxed)).then(|| self.pieces.load(Relaxed))
    }
}

/// Runs a connection's streams.
#[derive(Clone)]
pub(super) struct Streams {
    tasks: Arc<Mutex<JoinSet<()>>>,
    stall: Duration,
    stalled: IntCounter,
}

impl Streams {
    /// Streams whose pieces may wait for `stall`; those that wait longer are counted.
    pub(super) fn new(stall: Duration, stalled: IntCounter) -> Self {
        Self { tasks: Arc::default(), stall, stalled }
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
        tasks.spawn(taken_in_time(stream, self.stall, self.stalled.clone()));
    }
}

/// Polls a stream to its end, or drops it: its client then sees a reset.
async fn taken_in_time(stream: impl Future<Output = ()>, stall: Duration, stalled: IntCounter) {
    let taken = Taken::new();
    let mut stream = pin!(stream);
    let mut waiting = None;
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|context| {
        let outer = CURRENT.replace(Some(Arc::clone(&taken)));
        let polled = stream.as_mut().poll(context);
        CURRENT.replace(outer);
        if polled.is_ready() {
            return polled;
        }
        let Some(piece) = taken.waiting() else {
            waiting = None;
            return Poll::Pending;
        };
        // Only a stream that waits has a timer, and only it looks at the clock.
        let deadline = match waiting {
            Some((same, deadline)) if same == piece => deadline,
            _ => Instant::now() + stall,
        };
        waiting = Some((piece, deadline));
        let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        while timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= deadline {
                stalled.inc();
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
        Poll::Pending
    })
    .await;
}
