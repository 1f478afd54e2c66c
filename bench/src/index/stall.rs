//! Measures the longest delay of a reader, and the part of it that the machine caused.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::measure::run_queue_wait_ns;

/// Number of calls between two reads of the waiting time, each of which takes microseconds.
const CALLS_PER_READ: usize = 64;

/// The longest of many calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stall {
    /// The longest duration of a call in nanoseconds, whatever the cause.
    pub longest_ns: u64,
    /// The longest duration in nanoseconds, without the time for which the thread was ready to run
    /// but had no processor. Time that a hypervisor took is included, because the kernel does not
    /// know it.
    pub running_ns: u64,
}

impl Stall {
    /// Calls `read` again and again until `done` is set.
    pub fn watch(done: &AtomicBool, mut read: impl FnMut()) -> Self {
        let mut stall = Self::default();
        while !done.load(Ordering::Acquire) {
            let waited_ns = run_queue_wait_ns();
            let mut longest_ns = 0;
            for _ in 0..CALLS_PER_READ {
                let start = Instant::now();
                read();
                longest_ns = longest_ns.max(start.elapsed().as_nanos() as u64);
            }
            stall.longest_ns = stall.longest_ns.max(longest_ns);
            if longest_ns > stall.running_ns {
                let waited_ns = run_queue_wait_ns() - waited_ns;
                stall.running_ns = stall.running_ns.max(longest_ns.saturating_sub(waited_ns));
            }
        }
        stall
    }

    /// The maximum of both durations.
    pub fn max(self, other: Self) -> Self {
        Self {
            longest_ns: self.longest_ns.max(other.longest_ns),
            running_ns: self.running_ns.max(other.running_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_longest_look_counts_whole() {
        let done = AtomicBool::new(false);
        let mut looks = 0;
        let stall = Stall::watch(&done, || {
            looks += 1;
            if looks == 3 {
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(5) {}
            }
            done.store(looks > CALLS_PER_READ, Ordering::Release);
        });
        assert!(stall.longest_ns >= 5_000_000, "{stall:?}");
        assert!(stall.running_ns <= stall.longest_ns);
    }
}
