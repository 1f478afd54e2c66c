//! Log lines wait in a bounded queue while a program serves, so that a reader of stderr who does
//! not keep up (a blocked pipe) delays no request: lines are dropped instead, and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of lines in the queue.
const QUEUE_LINES: usize = 16_384;
/// Maximum number of bytes in the queue.
const QUEUE_BYTES: usize = 8 << 20;
/// Number of bytes that are written at once, if as many wait.
const BATCH_BYTES: usize = 64 << 10;
/// Time for which a line of the access log waits for further ones: a write for each line, and a
/// thread that wakes for it, would cost a request more than its line.
const ACCESS_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time for the last lines to be written.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The queue of this process, while it serves.
static CURRENT: RwLock<Option<Arc<Shared>>> = RwLock::new(None);
/// Whether stderr was blocked when the queue was closed. Later lines would block the process.
static IS_BLOCKED: AtomicBool = AtomicBool::new(false);

/// What became of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineResult {
    /// The line was written.
    Written,
    /// The line was dropped, because stderr is not read fast enough.
    QueueFull,
    /// The line could not be written.
    WriteFailed,
}

/// Counts lines: how many, whether they are of the access log, and what became of them.
pub type CountLines = Box<dyn Fn(u64, bool, LineResult) + Send + Sync>;

/// A line, and whether it is of the access log.
struct Line {
    bytes: Vec<u8>,
    is_access: bool,
}

struct Shared {
    lines: SyncSender<Line>,
    queued_bytes: AtomicUsize,
    count: CountLines,
}

impl Shared {
    fn push(&self, bytes: Vec<u8>, is_access: bool) {
        let size = bytes.len();
        let fits = self.queued_bytes.fetch_add(size, Relaxed) + size <= QUEUE_BYTES;
        if !fits || self.lines.try_send(Line { bytes, is_access }).is_err() {
            self.queued_bytes.fetch_sub(size, Relaxed);
            (self.count)(1, is_access, LineResult::QueueFull);
        }
    }
}

/// The queue of log lines of a program that serves. Closing or dropping it writes the lines that
/// wait; from then on, lines are written directly.
pub struct LineQueue(Option<JoinHandle<()>>);

/// Lets all log lines of this process wait in a queue, from which one thread writes them to stderr.
/// `count` counts them.
///
/// # Errors
/// The thread cannot be started.
pub fn queue_lines(count: CountLines) -> io::Result<LineQueue> {
    let (lines, queued) = sync_channel(QUEUE_LINES);
    let shared = Arc::new(Shared { lines, queued_bytes: AtomicUsize::new(0), count });
    let weak = Arc::downgrade(&shared);
    let write = move || {
        while let Some((batch, counts, bytes)) = next_batch(&queued, ACCESS_INTERVAL) {
            let result = match io::stderr().write_all(&batch) {
                Ok(()) => LineResult::Written,
                Err(_) => LineResult::WriteFailed,
            };
            let Some(shared) = weak.upgrade() else { continue };
            shared.queued_bytes.fetch_sub(bytes, Relaxed);
            for (lines, is_access) in [(counts[0], false), (counts[1], true)] {
                if lines > 0 {
                    (shared.count)(lines, is_access, result);
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("log".to_owned()).spawn(write)?;
    *CURRENT.write().unwrap_or_else(PoisonError::into_inner) = Some(shared);
    Ok(LineQueue(Some(thread)))
}

/// Waits for lines; returns them together, with their numbers (others, and those of the access log)
/// and their bytes. `None` if the queue is closed and empty. After a line of the access log it waits
/// for `interval`.
fn next_batch(queued: &Receiver<Line>, interval: Duration) -> Option<(Vec<u8>, [u64; 2], usize)> {
    let Line { bytes: mut batch, is_access } = queued.recv().ok()?;
    if is_access {
        wait(interval);
    }
    let mut counts = [0, 0];
    counts[usize::from(is_access)] += 1;
    while batch.len() < BATCH_BYTES
        && let Ok(Line { bytes, is_access }) = queued.try_recv()
    {
        batch.extend_from_slice(&bytes);
        counts[usize::from(is_access)] += 1;
    }
    let bytes = batch.len();
    Some((batch, counts, bytes))
}

/// Waits. The thread does nothing but write, and no line is lost if it writes late.
#[allow(clippy::disallowed_methods)]
fn wait(interval: Duration) {
    std::thread::sleep(interval);
}

impl LineQueue {
    /// Writes the lines that wait, for at most two seconds.
    pub fn close(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.0.take() else { return };
        // The thread ends when the last sender is gone.
        drop(CURRENT.write().unwrap_or_else(PoisonError::into_inner).take());
        let (done, ended) = sync_channel(1);
        let join = move || {
            let _panicked = thread.join();
            let _gone = done.send(());
        };
        let waits = std::thread::Builder::new().spawn(join);
        if waits.is_err() || ended.recv_timeout(CLOSE_TIMEOUT).is_err() {
            IS_BLOCKED.store(true, Relaxed);
        }
    }
}

impl Drop for LineQueue {
    fn drop(&mut self) {
        self.end();
    }
}

/// Writes a line of the access log, which ends with a line feed.
pub fn write_line(line: Vec<u8>) {
    put(line, true);
}

fn put(line: Vec<u8>, is_access: bool) {
    let current = CURRENT.read().unwrap_or_else(PoisonError::into_inner);
    match &*current {
        Some(shared) => shared.push(line, is_access),
        None if IS_BLOCKED.load(Relaxed) => {}
        // A closed pipe loses log lines and must not affect the service.
        None => drop(io::stderr().write_all(&line)),
    }
}

/// Writes the lines that `tracing` formats, each in one call.
#[derive(Default)]
pub(super) struct LineWriter;

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        put(line.to_vec(), false);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_wait_are_taken_together_and_counted() {
        let (lines, queued) = sync_channel(8);
        for (text, is_access) in [("a\n", true), ("b\n", false), ("c\n", true)] {
            lines.send(Line { bytes: text.into(), is_access }).unwrap();
        }
        let (batch, counts, bytes) = next_batch(&queued, Duration::ZERO).unwrap();
        assert_eq!((batch.as_slice(), counts, bytes), (&b"a\nb\nc\n"[..], [1, 2], 6));
        drop(lines);
        assert!(next_batch(&queued, Duration::ZERO).is_none());
    }

    #[test]
    fn a_full_queue_drops_lines_and_counts_them() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&dropped);
        let count: CountLines = Box::new(move |lines, _, result| {
            assert_eq!(result, LineResult::QueueFull);
            counted.fetch_add(lines as usize, Relaxed);
        });
        let (lines, queued) = sync_channel(2);
        let shared = Shared { lines, queued_bytes: AtomicUsize::new(0), count };
        for _ in 0..5 {
            shared.push(b"line\n".to_vec(), true);
        }
        assert_eq!(dropped.load(Relaxed), 3);
        assert_eq!(shared.queued_bytes.load(Relaxed), 10);
        // A line that is larger than the queue may be is not kept, either.
        drop(queued);
        shared.push(vec![b'x'; QUEUE_BYTES], false);
        assert_eq!(dropped.load(Relaxed), 4);
    }
}
