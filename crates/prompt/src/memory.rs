//! Returns freed memory to the system.
#![allow(unsafe_code)] // The allocator's crate has no safe name for this one call.

// Links the library that defines the function, also where mimalloc is not the global allocator.
use mimalloc as _;

unsafe extern "C" {
    /// Frees what this thread's heap holds in reserve, and returns all unused pages to the system.
    /// Takes a flag and returns nothing, so no caller can use it wrongly.
    safe fn mi_collect(force: bool);
}

/// Returns freed memory to the system. To be called after work that needs much more memory than its
/// result; otherwise the allocator keeps the pages until it needs them.
pub(crate) fn give_back() {
    mi_collect(true);
}
