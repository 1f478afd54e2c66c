//! Buffers that a thread keeps for its next prompt, so that long prompts are not written to memory
//! that is outside the processor's caches.

use std::cell::Cell;

/// Maximum capacity of a kept buffer in bytes; larger buffers are dropped.
const MAX_BYTES: usize = 256 << 10;

thread_local! {
    /// The buffer for a rendered prompt.
    pub(super) static TEXT: SpareBuffer<u8> = const { SpareBuffer::new() };
    /// The buffer for token ids.
    pub(super) static IDS: SpareBuffer<u32> = const { SpareBuffer::new() };
}

pub(super) struct SpareBuffer<T>(Cell<Vec<T>>);

impl<T> SpareBuffer<T> {
    const fn new() -> Self {
        Self(Cell::new(Vec::new()))
    }

    /// An empty buffer with at least this capacity.
    pub(super) fn take(&self, capacity: usize) -> Vec<T> {
        let mut buffer = self.0.take();
        buffer.reserve(capacity);
        buffer
    }

    /// Keeps the buffer for the thread's next prompt, once its content is no longer needed.
    pub(super) fn give_back(&self, mut buffer: Vec<T>) {
        let other = self.0.take();
        let fits = buffer.capacity() * size_of::<T>() <= MAX_BYTES;
        buffer.clear();
        self.0.set(if fits && buffer.capacity() > other.capacity() { buffer } else { other });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_used_next_and_is_empty() {
        let mut buffer = IDS.with(|spare| spare.take(100));
        buffer.extend([1, 2]);
        let place = buffer.as_ptr();
        IDS.with(|spare| spare.give_back(buffer));
        let again = IDS.with(|spare| spare.take(50));
        assert_eq!((again.as_ptr(), again.len()), (place, 0));
        let other = IDS.with(|spare| spare.take(50));
        assert_ne!(other.as_ptr(), place, "another buffer is in use");
        for capacity in [10, 1000, 100, MAX_BYTES] {
            IDS.with(|spare| spare.give_back(Vec::with_capacity(capacity)));
        }
        let largest = IDS.with(|spare| spare.take(1)).capacity();
        assert!((1000..MAX_BYTES).contains(&largest), "the largest buffer below the bound is kept");
    }
}
