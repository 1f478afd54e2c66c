//! An allocator that counts allocated bytes. Implementing an allocator needs `unsafe`; all calls
//! are passed to the system's allocator.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of bytes that are currently allocated.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// Counts what the system's allocator returns.
struct Counting;

// SAFETY: every call is passed to the system's allocator unchanged; counting has no effect on it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

pub(crate) fn allocated() -> usize {
    ALLOCATED.load(Ordering::Relaxed)
}
