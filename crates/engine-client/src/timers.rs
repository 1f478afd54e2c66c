//! Timeouts that are rarely reached.
//!
//! Setting and removing a timer takes a lock that all threads share. So a timer that was not needed
//! is not removed. The next call with the same timeout, which ends later, takes it over; the timer
//! may then fire too early and is set again.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Number of lists of spare timers: about one per thread, so that threads rarely wait for each
/// other.
const PARTS: usize = 16;
/// Maximum number of spare timers in a list; further timers are removed.
const SPARE_MAX: usize = 64;

/// The spare timers of a client.
#[derive(Debug, Default)]
pub struct Timers {
    parts: [Mutex<Vec<SpareTimer>>; PARTS],
}

/// A timer that is set, for calls with the same timeout.
#[derive(Debug)]
struct SpareTimer {
    limit: Duration,
    sleep: Pin<Box<Sleep>>,
}

thread_local! {
    static PART: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Relaxed) % PARTS
    };
}

/// The timeout of a call was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutError;

impl Timers {
    /// A timer for calls with this timeout. When dropped, it becomes a spare timer.
    pub fn of(self: &Arc<Self>, limit: Duration) -> Timer {
        Timer { timers: Arc::clone(self), limit, sleep: None }
    }

    /// Runs a call with a timeout.
    ///
    /// # Errors
    /// [`TimeoutError`] if the call has not ended within the timeout.
    pub async fn bound<T>(
        self: &Arc<Self>,
        limit: Duration,
        call: impl Future<Output = T>,
    ) -> Result<T, TimeoutError> {
        self.of(limit).bound(call).await
    }

    fn part(&self) -> &Mutex<Vec<SpareTimer>> {
        &self.parts[PART.with(|part| *part)]
    }

    fn take(&self, limit: Duration, due: Instant) -> Pin<Box<Sleep>> {
        let mut spare = self.part().lock().unwrap_or_else(PoisonError::into_inner);
        match spare.iter().rposition(|spare| spare.limit == limit) {
            Some(place) => spare.swap_remove(place).sleep,
            None => Box::pin(sleep_until(due)),
        }
    }
}

/// A timer, which is set when it is first awaited.
#[derive(Debug)]
pub struct Timer {
    timers: Arc<Timers>,
    limit: Duration,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Timer {
    /// The timeout of calls.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Sets the timeout of the following calls.
    pub fn set_limit(&mut self, limit: Duration) {
        self.give_back();
        self.limit = limit;
    }

    /// Runs a call with the timer's timeout.
    ///
    /// # Errors
    /// [`TimeoutError`] if the call has not ended within the timeout.
    pub async fn bound<T>(&mut self, call: impl Future<Output = T>) -> Result<T, TimeoutError> {
        let due = Instant::now() + self.limit;
        let mut call = pin!(call);
        poll_fn(|context| match call.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => self.poll_at(due, context).map(|()| Err(TimeoutError)),
        })
        .await
    }

    /// Ready once this time has come.
    pub fn poll_at(&mut self, due: Instant, context: &mut Context<'_>) -> Poll<()> {
        let sleep = self.sleep.get_or_insert_with(|| self.timers.take(self.limit, due));
        if sleep.deadline() > due {
            sleep.as_mut().reset(due);
        }
        loop {
            ready!(sleep.as_mut().poll(context));
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(due);
        }
    }

    fn give_back(&mut self) {
        let Some(sleep) = self.sleep.take() else { return };
        let mut spare = self.timers.part().lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_MAX {
            spare.push(SpareTimer { limit: self.limit, sleep });
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::sleep;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn each_call_has_its_own_time_though_timers_are_used_again() {
        let timers = Arc::new(Timers::default());
        for _ in 0..5 {
            assert_eq!(timers.bound(100 * MS, sleep(60 * MS)).await, Ok(()));
        }
        let began = Instant::now();
        assert_eq!(timers.bound(100 * MS, pending::<()>()).await, Err(TimeoutError));
        assert_eq!(began.elapsed(), 100 * MS, "an older timer may fire earlier");
        let began = Instant::now();
        assert_eq!(timers.bound(30 * MS, pending::<()>()).await, Err(TimeoutError));
        assert_eq!(began.elapsed(), 30 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn one_timer_serves_many_waits_with_changing_timeouts() {
        let timers = Arc::new(Timers::default());
        let mut timer = timers.of(1000 * MS);
        assert_eq!(timer.bound(sleep(900 * MS)).await, Ok(()));
        timer.set_limit(200 * MS);
        for _ in 0..20 {
            assert_eq!(timer.bound(sleep(150 * MS)).await, Ok(()));
        }
        let began = Instant::now();
        assert_eq!(timer.bound(pending::<()>()).await, Err(TimeoutError));
        assert_eq!(began.elapsed(), 200 * MS);
    }
}
