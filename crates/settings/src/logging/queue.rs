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
static CURRENT: RwLock<Option<Arc<QueueState>>> = RwLock::new(None);
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

struct QueueState {
    lines: SyncSender<Line>,
    queued_bytes: AtomicUsize,
    count: CountLines,
}

impl QueueState {
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
    let shared = Arc::new(QueueState { lines, queued_bytes: AtomicUsize::new(0), count });
    let weak = Arc::downgrade(&shared);
    let write = move || {
        let mut batches = Batches::new(queued);
        while let Some(batch) = batches.next(|| wait(ACCESS_INTERVAL)) {
            let result = match io::stderr().write_all(&batch.bytes) {
                Ok(()) => LineResult::Written,
                Err(_) => LineResult::WriteFailed,
            };
            let Some(shared) = weak.upgrade() else { continue };
            shared.queued_bytes.fetch_sub(batch.bytes.len(), Relaxed);
            for (lines, is_access) in [(batch.other_lines, false), (batch.access_lines, true)] {
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

/// The lines that wait, in the order in which they are written together.
struct Batches {
    queued: Receiver<Line>,
    /// Whether lines were left when the last batch was full.
    is_behind: bool,
}

/// Lines that are written together.
#[derive(Debug, PartialEq, Eq)]
struct Batch {
    bytes: Vec<u8>,
    /// The number of lines of the access log, and of all others.
    access_lines: u64,
    other_lines: u64,
}

impl Batches {
    fn new(queued: Receiver<Line>) -> Self {
        Self { queued, is_behind: false }
    }

    /// Waits for a line; `None` if the queue is closed and empty. After a line of the access log,
    /// `wait` lets further ones come, unless lines are left of the last batch: otherwise a batch for
    /// each wait would be all that is ever written.
    fn next(&mut self, wait: impl FnOnce()) -> Option<Batch> {
        let first = self.queued.recv().ok()?;
        if first.is_access && !self.is_behind {
            wait();
        }
        let mut batch = Batch { bytes: Vec::new(), access_lines: 0, other_lines: 0 };
        batch.add(first);
        while batch.bytes.len() < BATCH_BYTES {
            let Ok(line) = self.queued.try_recv() else {
                self.is_behind = false;
                return Some(batch);
            };
            batch.add(line);
        }
        self.is_behind = true;
        Some(batch)
    }
}

impl Batch {
    fn add(&mut self, Line { bytes, is_access }: Line) {
        match self.bytes.is_empty() {
            true => self.bytes = bytes,
            false => self.bytes.extend_from_slice(&bytes),
        }
        let lines = if is_access { &mut self.access_lines } else { &mut self.other_lines };
        *lines += 1;
    }
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
        let mut batches = Batches::new(queued);
        let batch = batches.next(|| ()).unwrap();
        let expected = Batch { bytes: b"a\nb\nc\n".to_vec(), access_lines: 2, other_lines: 1 };
        assert_eq!(batch, expected);
        drop(lines);
        assert_eq!(batches.next(|| ()), None);
    }

    #[test]
    fn nothing_is_waited_for_while_lines_are_left_of_the_last_batch() {
        let line = || Line { bytes: vec![b'x'; BATCH_BYTES / 2], is_access: true };
        let (lines, queued) = sync_channel(8);
        let mut batches = Batches::new(queued);
        let mut waits = Vec::new();
        let mut next = || {
            let mut waited = false;
            let batch = batches.next(|| waited = true).unwrap();
            waits.push((batch.access_lines, waited));
        };
        (0..5).for_each(|_| lines.send(line()).unwrap());
        (0..3).for_each(|_| next());
        lines.send(line()).unwrap();
        next();
        assert_eq!(waits, [(2, true), (2, false), (1, false), (1, true)]);
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
        let shared = QueueState { lines, queued_bytes: AtomicUsize::new(0), count };
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
