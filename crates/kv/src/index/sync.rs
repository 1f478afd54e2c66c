//! The atomics that readers and the writer share; those of a model checker under `--cfg loom`, and
//! in unit tests those that report every access ([`super::access_hook`]).

#[cfg(all(test, not(loom)))]
pub(super) use super::access_hook::{AtomicU32, AtomicU64};
#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(any(test, loom)))]
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{Ordering, fence};

/// Before repeating a read: tells the model checker that only other threads can make progress now.
#[inline]
pub(super) fn look_again() {
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// The cell with the current state, which is replaced as a whole.
#[cfg(not(loom))]
pub(super) type SwapCell<T> = arc_swap::ArcSwap<T>;
#[cfg(loom)]
pub(super) use checked::SwapCell;

#[cfg(loom)]
mod checked {
    use std::sync::Arc;

    use loom::sync::Mutex;

    /// A stand-in that the model checker knows; the replacing of values is not what is checked.
    #[derive(Debug)]
    pub(in super::super) struct SwapCell<T>(Mutex<Arc<T>>);

    impl<T> SwapCell<T> {
        pub(in super::super) fn from_pointee(value: T) -> Self {
            Self(Mutex::new(Arc::new(value)))
        }

        pub(in super::super) fn load(&self) -> Arc<T> {
            Arc::clone(&self.0.lock().unwrap())
        }

        pub(in super::super) fn swap(&self, value: Arc<T>) -> Arc<T> {
            std::mem::replace(&mut *self.0.lock().unwrap(), value)
        }
    }
}
