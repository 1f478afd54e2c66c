//! Atomics that report every access, so that a test can act as another thread would at that moment.

use std::cell::RefCell;
use std::sync::atomic::{self, Ordering};

/// The kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reported before the load, so that the load sees what the hook does.
    Load,
    Store,
}

type Hook = Box<dyn FnMut(Access)>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Calls `hook` at every access of this thread within `body`, except at accesses by the hook.
pub(super) fn with_hook<R>(hook: impl FnMut(Access) + 'static, body: impl FnOnce() -> R) -> R {
    HOOK.set(Some(Box::new(hook)));
    let result = body();
    HOOK.set(None);
    result
}

fn touched(access: Access) {
    if let Some(mut hook) = HOOK.take() {
        hook(access);
        HOOK.set(Some(hook));
    }
}

macro_rules! hooked_atomic {
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

hooked_atomic!(AtomicU32, u32);
hooked_atomic!(AtomicU64, u64);
