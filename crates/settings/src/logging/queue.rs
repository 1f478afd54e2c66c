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
/// Maximum time for the last lines to be written.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The queue of this process, while it serves.
static CURRENT: RwLock<Option<Arc<QueueState>>> = RwLock::new(None);
/// Whether stderr was blocked when the queue was closed. Later lines would block the process.
static IS_BLOCKED: AtomicBool = AtomicBool::new(false);

/// Counts lines that were lost: dropped, because stderr is not read fast enough, or not written.
pub type CountLost = Box<dyn Fn(u64) + Send + Sync>;

struct QueueState {
    lines: SyncSender<Vec<u8>>,
    queued_bytes: AtomicUsize,
    count_lost: CountLost,
}

impl QueueState {
    fn push(&self, line: Vec<u8>) {
        let size = line.len();
        let fits = self.queued_bytes.fetch_add(size, Relaxed) + size <= QUEUE_BYTES;
        if !fits || self.lines.try_send(line).is_err() {
            self.queued_bytes.fetch_sub(size, Relaxed);
            (self.count_lost)(1);
        }
    }
}

/// The queue of log lines of a program that serves. Closing or dropping it writes the lines that
/// wait; from then on, lines are written directly.
pub struct LineQueue(Option<JoinHandle<()>>);

/// Lets all log lines of this process wait in a queue, from which one thread writes them to stderr.
/// `count_lost` counts those that are lost.
///
/// # Errors
/// The thread cannot be started.
pub fn queue_lines(count_lost: CountLost) -> io::Result<LineQueue> {
    let (lines, queued) = sync_channel(QUEUE_LINES);
    let shared = Arc::new(QueueState { lines, queued_bytes: AtomicUsize::new(0), count_lost });
    let weak = Arc::downgrade(&shared);
    let write = move || {
        while let Some((lines, bytes)) = next_batch(&queued) {
            let is_written = io::stderr().write_all(&bytes).is_ok();
            let Some(shared) = weak.upgrade() else { continue };
            shared.queued_bytes.fetch_sub(bytes.len(), Relaxed);
            if !is_written {
                (shared.count_lost)(lines);
            }
        }
    };
    let thread = std::thread::Builder::new().name("log".to_owned()).spawn(write)?;
    *CURRENT.write().unwrap_or_else(PoisonError::into_inner) = Some(shared);
    Ok(LineQueue(Some(thread)))
}

/// Waits for a line. Returns the number of lines that are written together, and their bytes; `None`
/// if the queue is closed and empty.
fn next_batch(queued: &Receiver<Vec<u8>>) -> Option<(u64, Vec<u8>)> {
    let mut bytes = queued.recv().ok()?;
    let mut lines = 1;
    while bytes.len() < BATCH_BYTES
        && let Ok(line) = queued.try_recv()
    {
        bytes.extend_from_slice(&line);
        lines += 1;
    }
    Some((lines, bytes))
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

fn put(line: Vec<u8>) {
    let current = CURRENT.read().unwrap_or_else(PoisonError::into_inner);
    match &*current {
        Some(shared) => shared.push(line),
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
        put(line.to_vec());
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
    fn lines_that_wait_are_written_together() {
        let (lines, queued) = sync_channel(8);
        for text in ["a\n", "b\n"] {
            lines.send(text.into()).unwrap();
        }
        assert_eq!(next_batch(&queued), Some((2, b"a\nb\n".to_vec())));
        for _ in 0..3 {
            lines.send(vec![b'x'; BATCH_BYTES / 2]).unwrap();
        }
        assert_eq!(next_batch(&queued).unwrap().0, 2);
        drop(lines);
        assert_eq!(next_batch(&queued).unwrap().0, 1);
        assert_eq!(next_batch(&queued), None);
    }

    #[test]
    fn a_full_queue_drops_lines_and_counts_them() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&dropped);
        let count_lost: CountLost = Box::new(move |lines| {
            counted.fetch_add(lines as usize, Relaxed);
        });
        let (lines, queued) = sync_channel(2);
        let shared = QueueState { lines, queued_bytes: AtomicUsize::new(0), count_lost };
        for _ in 0..5 {
            shared.push(b"line\n".to_vec());
        }
        assert_eq!(dropped.load(Relaxed), 3);
        assert_eq!(shared.queued_bytes.load(Relaxed), 10);
        // A line that is larger than the queue may be is not kept, either.
        drop(queued);
        shared.push(vec![b'x'; QUEUE_BYTES]);
        assert_eq!(dropped.load(Relaxed), 4);
    }
}
