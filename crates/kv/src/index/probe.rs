//! Atomics that report every access, so that a test can act as another thread would at that moment.

use std::cell::RefCell;
use std::sync::atomic::{self, Ordering};

/// The kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reported before the load, so that the load sees what the probe does.
    Load,
    Store,
}

type Probe = Box<dyn FnMut(Access)>;

thread_local! {
    static PROBE: RefCell<Option<Probe>> = const { RefCell::new(None) };
}

/// Calls `probe` at every access of this thread within `body`, except at accesses by the probe.
pub(super) fn probed<R>(probe: impl FnMut(Access) + 'static, body: impl FnOnce() -> R) -> R {
    PROBE.set(Some(Box::new(probe)));
    let result = body();
    PROBE.set(None);
    result
}

fn touched(access: Access) {
    if let Some(mut probe) = PROBE.take() {
        probe(access);
        PROBE.set(Some(probe));
    }
}

macro_rules! probed_atomic {
    ($name:ident, $value:ty) => {
        #[derive(Debug)]
        pub(super) struct $name(atomic::$name);

        impl $name {
            pub(super) const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            pub(super) fn load(&self, ordering: Ordering) -> $value {
                touched(Access::Load);
                self.0.load(ordering)
            }

            pub(super) fn store(&self, value: $value, ordering: Ordering) {
                self.0.store(value, ordering);
                touched(Access::Store);
            }
        }
    };
}

probed_atomic!(AtomicU32, u32);
probed_atomic!(AtomicU64, u64);
