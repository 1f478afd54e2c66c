//! A global allocator that counts bytes.
//!
//! It needs unsafe code because `GlobalAlloc` is an unsafe trait. Each method passes its arguments
//! to `System` unchanged and returns the result of `System`, so it keeps the contract if `System`
//! does. Only sizes are read.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

/// Whether bytes are counted. They are not counted in processes that measure time, because the
/// atomic additions would slow down the index that allocates most.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// The size in bytes from which glibc maps memory instead of taking it from the heap, by default.
const MAPPED_BYTES: usize = 128 << 10;
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

/// The system allocator, which counts live bytes after [`start_counting`].
pub struct Counting;

/// The bytes that an allocation takes in glibc's allocator: with a header of 8 bytes, rounded up to
/// a multiple of 16, and at least 32; mapped memory in whole pages.
fn bytes_taken(bytes: usize) -> isize {
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
        count(bytes_taken(layout.size()));
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(bytes_taken(layout.size()));
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-bytes_taken(layout.size()));
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(bytes_taken(new_size) - bytes_taken(layout.size()));
        unsafe { System.realloc(at, layout, new_size) }
    }
}

/// Starts to count. Must be called at the beginning of `main`, before anything is allocated that is
/// freed later.
pub fn start_counting() {
    COUNTING.store(true, Ordering::Relaxed);
}

/// Bytes that have been allocated and not freed since [`start_counting`], as glibc's allocator
/// takes them.
pub fn live_bytes() -> isize {
    LIVE_BYTES.load(Ordering::Relaxed)
}
