//! Prefetches memory before it is needed.
//!
//! One of two files of this crate with `unsafe`: there is no safe way to prefetch. The names of one
//! event are scattered over a table larger than the caches; read one by one, each would wait for
//! main memory. The same is true of the words of a text in the router's tokenizer. A prefetch of
//! any address is harmless (it changes nothing and cannot fault), and here the address is that of a
//! reference.
#![allow(unsafe_code)]

/// Makes the processor fetch what `place` refers to, without waiting for it.
#[inline(always)]
pub fn prefetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect that the program can observe, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) }
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        let place = std::ptr::from_ref(place);
        // SAFETY: as above; the instruction changes no register, no flag and no stack.
        unsafe {
            std::arch::asm!(
                "prfm pldl1keep, [{place}]",
                place = in(reg) place,
                options(nostack, preserves_flags, readonly)
            );
        }
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
