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
/// From this size on memory is mapped; glibc's default.
const MAPPED_BYTES: usize = 128 << 10;
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

/// The system allocator, counting live bytes when asked to.
pub struct Counting;

/// What a request takes from glibc's allocator, slack included: eight bytes of
/// header, sixteen of granularity, 32 at least; whole pages where it is large.
fn taken(bytes: usize) -> isize {
    let taken = match bytes {
        0..24 => 32,
        24..MAPPED_BYTES => (bytes + 8).next_multiple_of(16),
        _ => (bytes + 16).next_multiple_of(4096),
    };
    taken as isize
}

fn count(bytes: isize) {
    if COUNTING.load(Ordering::Relaxed) {
        LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(taken(layout.size()));
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(taken(layout.size()));
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-taken(layout.size()));
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(taken(new_size) - taken(layout.size()));
        unsafe { System.realloc(at, layout, new_size) }
    }
}

/// Counts from here on; to be called before anything is allocated that is
/// freed later, so first thing in `main`.
pub fn start_counting() {
    COUNTING.store(true, Ordering::Relaxed);
}

/// Bytes allocated and not freed since counting started, the allocator's slack
/// included.
pub fn live_bytes() -> isize {
    LIVE_BYTES.load(Ordering::Relaxed)
}
