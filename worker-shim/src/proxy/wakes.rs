//! The waker of a part of a task, such as a connection that is driven by whoever waits for what
//! comes over it.
//!
//! Driver and part are one task. What the part tells itself, as a connection does its own body,
//! wakes nobody then: it is seen in the same round. Only what comes from outside wakes the task;
//! and as long as nothing has come for the part, it is not looked at.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake};

use futures_util::task::AtomicWaker;

const DRIVING: u8 = 1;
const WOKEN: u8 = 2;

/// Rounds in which one end of a connection may wake the other before other tasks have their
/// turn: whoever is over its budget wakes itself for ever.
const ROUNDS_MAX: usize = 4;

/// Wakes a task, but for what it does itself.
#[derive(Debug)]
pub(super) struct Wakes {
    task: AtomicWaker,
    state: AtomicU8,
}

impl Wakes {
    /// Wakes the task that it was driven by no more.
    pub(super) fn forget(&self) {
        self.task.take();
    }

    /// For something that was not polled yet.
    pub(super) fn new() -> Self {
        Self { task: AtomicWaker::new(), state: AtomicU8::new(WOKEN) }
    }

    /// Calls `step` in the task of `context`, again if it was woken meanwhile; not at all if it
    /// was pending before and nothing has woken it since.
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
            self.state.swap(DRIVING, Ordering::AcqRel);
            let polled = step();
            if polled.is_ready() {
                // There may be more.
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

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.fetch_or(WOKEN, Ordering::AcqRel) & DRIVING == 0 {
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
    fn what_a_task_does_itself_is_seen_at_once_and_wakes_it_not() {
        let (count, wakes) = (Arc::new(Count::default()), Arc::new(Wakes::new()));
        let (task, inner) = (Waker::from(Arc::clone(&count)), Waker::from(Arc::clone(&wakes)));
        let mut context = Context::from_waker(&task);
        let mut left = 2;
        let polled = wakes.drive(&mut context, || {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            inner.wake_by_ref();
            Poll::Pending
        });
        assert_eq!((polled, count.0.load(Ordering::Relaxed)), (Poll::Ready(()), 0));
        // From outside it does.
        assert_eq!(wakes.drive(&mut context, || Poll::<()>::Pending), Poll::Pending);
        assert!(wakes.drive(&mut context, || Poll::Ready(())).is_pending(), "nothing has come");
        inner.wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(wakes.drive(&mut context, || Poll::Ready(())).is_ready());
        // Whoever wakes itself for ever lets others have their turn, and comes back.
        let polled = wakes.drive(&mut context, || {
            inner.wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled, count.0.load(Ordering::Relaxed)), (Poll::Pending, 2));
        wakes.forget();
        inner.wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
