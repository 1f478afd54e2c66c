//! A counting global allocator.
//!
//! Unsafe because `GlobalAlloc` is an unsafe trait: every method hands its
//! arguments to `System` unchanged and returns what `System` returned, so its
//! contract is the system allocator's own. Only sizes are looked at.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

/// Counting is off in processes that measure time: two atomic additions per
/// allocation would be charged to whoever allocates most.
static COUNTING: AtomicBool = AtomicBool::new(false);
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

/// The system allocator, counting live bytes when asked to.
pub struct Counting;

fn count(bytes: isize) {
    if COUNTING.load(Ordering::Relaxed) {
        LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        unsafe { System.realloc(at, layout, new_size) }
    }
}

/// Counts from here on; to be called before anything is allocated that is
/// freed later, so first thing in `main`.
pub fn start_counting() {
    COUNTING.store(true, Ordering::Relaxed);
}

/// Bytes allocated and not freed since counting started.
pub fn live_bytes() -> isize {
    LIVE_BYTES.load(Ordering::Relaxed)
}
