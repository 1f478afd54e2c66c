//! Returns freed memory to the system.
#![allow(unsafe_code)] // The allocator's crate has no safe name for this one call.

// The library that has it, also where it is not the allocator.
use mimalloc as _;

unsafe extern "C" {
    /// Frees what this thread's heap keeps for itself, and has the system take back all pages
    /// that nothing lies in. It takes a flag and gives nothing: no caller can use it wrongly.
    safe fn mi_collect(force: bool);
}

/// Gives memory back that was freed: after work that takes much more of it than its result.
/// Otherwise the allocator keeps such pages until it has use for them.
pub(crate) fn give_back() {
    mi_collect(true);
}
