//! How long a reader was kept, and what of that the machine did.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::measure::run_queue_wait_ns;

/// Looks between two questions about the processor, which take microseconds each.
const LOOKS: usize = 64;

/// The longest of many looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stall {
    /// Its duration in nanoseconds, whatever its cause.
    pub longest_ns: u64,
    /// The longest, each less the time in which its thread was ready and had no processor, as
    /// far as this kernel knows: what a hypervisor took is still in it.
    pub running_ns: u64,
}

impl Stall {
    /// Looks again and again until all is done.
    pub fn watch(done: &AtomicBool, mut look: impl FnMut()) -> Self {
        let mut stall = Self::default();
        while !done.load(Ordering::Acquire) {
            let waited_ns = run_queue_wait_ns();
            let mut longest_ns = 0;
            for _ in 0..LOOKS {
                let start = Instant::now();
                look();
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

    /// The longer of each of two.
    pub fn max(self, other: Self) -> Self {
        Self {
            longest_ns: self.longest_ns.max(other.longest_ns),
            running_ns: self.running_ns.max(other.running_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_longest_look_counts_whole() {
        let done = AtomicBool::new(false);
        let mut looks = 0;
        let stall = Stall::watch(&done, || {
            looks += 1;
            if looks == 3 {
                thread::sleep(Duration::from_millis(5));
            }
            done.store(looks > LOOKS, Ordering::Release);
        });
        assert!(stall.longest_ns >= 5_000_000, "{stall:?}");
        assert!(stall.running_ns <= stall.longest_ns);
    }
}
