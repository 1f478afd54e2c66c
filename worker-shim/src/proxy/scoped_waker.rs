//! A waker for a part of a task, such as a connection that is driven by the task that reads from
//! it.
//!
//! The part runs within the task. A wake-up that the part causes itself, as a connection does for
//! its own body, does not wake the task: the part is polled again in the same round. Only a
//! wake-up from outside wakes the task. A part without a wake-up is not polled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake};

use futures_util::task::AtomicWaker;

const POLLING: u8 = 1;
const WOKEN: u8 = 2;

/// Maximum number of polls in a row before other tasks run. A part that has used up its
/// cooperative budget would otherwise wake itself forever.
const ROUNDS_MAX: usize = 4;

/// Wakes a task unless the wake-up comes from the part while it is polled.
#[derive(Debug)]
pub(super) struct ScopedWaker {
    task: AtomicWaker,
    state: AtomicU8,
}

impl ScopedWaker {
    /// Detaches the waker from the task that last polled the part.
    pub(super) fn detach(&self) {
        self.task.take();
    }

    /// Creates a waker for a part that has not been polled yet.
    pub(super) fn new() -> Self {
        Self { task: AtomicWaker::new(), state: AtomicU8::new(WOKEN) }
    }

    /// Polls the part with `step` in the task of `context`, and again if it was woken during the
    /// poll. Does not poll a part that is pending and has not been woken since.
    pub(super) fn drive<T>(
        &self,
        context: &mut Context<'_>,
        mut step: impl FnMut() -> Poll<T>,
    ) -> Poll<T> {
        self.task.register(context.waker());
        for _ in 0..ROUNDS_MAX {
            if self.state.load(Ordering::Acquire) & WOKEN == 0 {
                return Poll::Pending;
            }
            self.state.swap(POLLING, Ordering::AcqRel);
            let polled = step();
            if polled.is_ready() {
                // There may be more to do.
                self.state.swap(WOKEN, Ordering::AcqRel);
                return polled;
            }
            let was = self.state.swap(0, Ordering::AcqRel);
            self.state.fetch_or(was & WOKEN, Ordering::AcqRel);
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for ScopedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) & POLLING == 0 {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Waker;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn wake_ups_from_within_are_handled_at_once_without_waking_the_task() {
        let (count, waker) = (Arc::new(Count::default()), Arc::new(ScopedWaker::new()));
        let (task, inner) = (Waker::from(Arc::clone(&count)), Waker::from(Arc::clone(&waker)));
        let mut context = Context::from_waker(&task);
        let mut left = 2;
        let polled = waker.drive(&mut context, || {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            inner.wake_by_ref();
            Poll::Pending
        });
        assert_eq!((polled, count.0.load(Ordering::Relaxed)), (Poll::Ready(()), 0));
        // A wake-up from outside wakes the task.
        assert_eq!(waker.drive(&mut context, || Poll::<()>::Pending), Poll::Pending);
        assert!(waker.drive(&mut context, || Poll::Ready(())).is_pending(), "it was not woken");
        inner.wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(waker.drive(&mut context, || Poll::Ready(())).is_ready());
        // A part that always wakes itself yields to other tasks and is polled again.
        let polled = waker.drive(&mut context, || {
            inner.wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled, count.0.load(Ordering::Relaxed)), (Poll::Pending, 2));
        waker.detach();
        inner.wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
