//! Writes lines about finished requests to a file or a stream. Lines go through a bounded queue, so
//! that no request ever waits for the disk or a reader; one task empties the queue.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec};
use serde::Serialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::destination::Destination;
use super::file::LedgerFile;
use splitrail_config::Rotation;
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::clock::unix_ms;

/// Maximum number of lines in the queue of a file, and in that of a stream.
const QUEUE_LINES: usize = 65_536;
const STREAM_QUEUE_LINES: usize = 16_384;
/// Maximum number of bytes in the queue. The disk or a reader may stall until the queue is full.
const QUEUE_BYTES: usize = 64 << 20;
/// Maximum number of lines that are written at once.
const BATCH_LINES: usize = 1024;

/// Time for which a line waits for further ones: a write for each line would cost a request more
/// than its line.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time at the end for a reader of a stream to take the last lines.
const STREAM_TIMEOUT: Duration = Duration::from_secs(2);

/// The version of lines that report lost records.
const VERSION: u32 = 1;

/// A file or stream with one line for each finished request. Without one, nothing is written.
#[derive(Debug)]
pub struct Lines {
    queue: Option<mpsc::Sender<Vec<u8>>>,
    shared: Arc<Shared>,
    /// The writer, until its task is started.
    writer: Mutex<Option<Writer>>,
}

/// The state that both ends of the queue share.
#[derive(Debug)]
struct Shared {
    /// The path of the file or the name of the stream, for logs; empty without one.
    path: String,
    /// Why a line finds no room in the queue.
    queue_full_reason: &'static str,
    /// Counts lines by result: `written`, `queue_full` or `write_failed`.
    records: IntCounterVec,
    /// Whether the last line was written or queued; `None` if nothing is written.
    is_writable: Option<IntGauge>,
    queued_bytes: AtomicUsize,
    /// Records lost since the last line that reported a loss.
    lost: AtomicU64,
    log_throttle: LogThrottle,
    /// Whether a loss was logged since the last successful write.
    loss_is_logged: AtomicBool,
}

/// The receiving end of the queue, which owns the file or stream.
#[derive(Debug)]
pub struct Writer {
    lines: mpsc::Receiver<Vec<u8>>,
    destination: Destination,
    shared: Arc<Shared>,
}

impl Lines {
    /// Opens the file that a section of the configuration names. It is opened at once, so that a
    /// mistake is found before any request is served. `records` counts lines by result, and
    /// `writable` has a series of this section if there is a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn open(
        section: &'static str,
        path: Option<&Path>,
        rotate: Rotation,
        records: IntCounterVec,
        writable: &IntGaugeVec,
    ) -> io::Result<Self> {
        let destination = match path {
            Some(path) => Some(Destination::File(LedgerFile::open(path, section, rotate)?)),
            None => None,
        };
        let is_writable = path.map(|_| writable.with_label_values(&[section]));
        let path = path.map(|path| path.display().to_string()).unwrap_or_default();
        let shared = Shared::new(path, "the disk does not keep up", records, is_writable);
        Ok(Self::new(destination, shared))
    }

    /// Lines that are written to a stream, such as the standard output of this program, under its
    /// `name` in logs.
    pub fn to_stream(
        section: &'static str,
        (name, stream): (&str, File),
        records: IntCounterVec,
        writable: &IntGaugeVec,
    ) -> Self {
        let is_writable = Some(writable.with_label_values(&[section]));
        let reason = "the reader does not keep up";
        let shared = Shared::new(name.to_owned(), reason, records, is_writable);
        Self::new(Some(Destination::stream(stream)), shared)
    }

    fn new(destination: Option<Destination>, shared: Shared) -> Self {
        let shared = Arc::new(shared);
        let Some(destination) = destination else {
            return Self { queue: None, shared, writer: Mutex::default() };
        };
        let (queue, lines) = mpsc::channel(match destination {
            Destination::File(_) => QUEUE_LINES,
            Destination::Stream(_) => STREAM_QUEUE_LINES,
        });
        let writer = Writer { lines, destination, shared: Arc::clone(&shared) };
        Self { queue: Some(queue), shared, writer: Mutex::new(Some(writer)) }
    }

    /// Whether lines are written.
    pub fn is_open(&self) -> bool {
        self.queue.is_some()
    }

    /// Puts a record into the queue, or counts it as lost if the queue is full. No request waits
    /// for a disk.
    pub fn write(&self, record: &impl Serialize) {
        if self.is_open()
            // Names and numbers always have a JSON form.
            && let Ok(mut line) = serde_json::to_vec(record)
        {
            line.push(b'\n');
            self.write_line(line);
        }
    }

    /// Like [`write`](Self::write), for a line that is made already and ends with a line feed.
    pub fn write_line(&self, line: Vec<u8>) {
        let Some(queue) = &self.queue else { return };
        let bytes = line.len();
        let fits = self.shared.queued_bytes.fetch_add(bytes, Relaxed) + bytes <= QUEUE_BYTES;
        if !fits || queue.try_send(line).is_err() {
            self.shared.queued_bytes.fetch_sub(bytes, Relaxed);
            self.shared.is_writable.iter().for_each(|gauge| gauge.set(0));
            self.shared.lose(1, "queue_full", self.shared.queue_full_reason);
        }
    }

    /// Takes the writer for its task; `None` after the first call and if nothing is written.
    pub fn take_writer(&self) -> Option<Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Shared {
    fn new(
        path: String,
        queue_full_reason: &'static str,
        records: IntCounterVec,
        is_writable: Option<IntGauge>,
    ) -> Self {
        is_writable.iter().for_each(|gauge| gauge.set(1));
        Self {
            path,
            queue_full_reason,
            records,
            is_writable,
            queued_bytes: AtomicUsize::default(),
            lost: AtomicU64::default(),
            log_throttle: LogThrottle::default(),
            loss_is_logged: AtomicBool::default(),
        }
    }

    fn lose(&self, records: usize, result: &str, why: &str) {
        self.lost.fetch_add(records as u64, Relaxed);
        self.records.with_label_values(&[result]).inc_by(records as u64);
        if self.log_throttle.may_log() {
            self.loss_is_logged.store(true, Relaxed);
            let (file, metric) = (&self.path, self.metric());
            tracing::error!(
                file,
                records,
                why,
                "records are lost for this file (said at most twice a minute; splitrail_{metric} counts)"
            );
        }
    }

    /// Notes that lines were written, and `lost` before them were not.
    fn written(&self, count: usize, lost: u64) {
        self.records.with_label_values(&["written"]).inc_by(count as u64);
        self.is_writable.iter().for_each(|gauge| gauge.set(1));
        if self.loss_is_logged.swap(false, Relaxed) {
            let file = &self.path;
            tracing::info!(
                file,
                lost,
                "records are written to this file again; it has a line about the lost ones"
            );
        }
    }

    /// The name of the metric that counts the lines of this file, without the prefix of all metrics.
    fn metric(&self) -> String {
        self.records.desc().first().map(|desc| desc.fq_name.clone()).unwrap_or_default()
    }
}

impl Writer {
    /// Writes lines until `stop`, and then the lines that are left in the queue.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            let stopped = tokio::select! {
                biased;
                () = stop.cancelled() => true,
                stopped = self.next_batch(&mut batch) => stopped,
            };
            if stopped {
                self.lines.close();
                while let Ok(line) = self.lines.try_recv() {
                    batch.push(line);
                }
            }
            let file = self.is_stream().then(|| self.shared.path.clone());
            let put = self.put(std::mem::take(&mut batch), stopped);
            let written = tokio::select! {
                written = put => written,
                () = give_up(file, &stop) => None,
            };
            let Some(writer) = written else { return };
            self = writer;
            if stopped {
                return;
            }
        }
    }

    fn is_stream(&self) -> bool {
        matches!(self.destination, Destination::Stream(_))
    }

    /// Waits for lines, and for further ones unless many wait already. Returns whether there are no
    /// more. If this is dropped, the lines so far are in `batch`.
    async fn next_batch(&mut self, batch: &mut Vec<Vec<u8>>) -> bool {
        let Some(line) = self.lines.recv().await else { return true };
        batch.push(line);
        if self.lines.len() < BATCH_LINES {
            sleep(BATCH_INTERVAL).await;
        }
        while batch.len() < BATCH_LINES
            && let Ok(line) = self.lines.try_recv()
        {
            batch.push(line);
        }
        false
    }

    /// Writes lines off the reactor, because a disk or a reader may be slow.
    async fn put(mut self, batch: Vec<Vec<u8>>, sync: bool) -> Option<Self> {
        let writing = tokio::task::spawn_blocking(move || {
            self.write(&batch);
            if sync && let Err(error) = self.destination.sync() {
                let file = &self.shared.path;
                tracing::error!(file, %error, "the end of this file may not be on the disk");
            }
            self
        });
        writing.await.ok()
    }

    fn write(&mut self, batch: &[Vec<u8>]) {
        let mut lines = Vec::new();
        let mut count = 0;
        for line in batch {
            self.shared.queued_bytes.fetch_sub(line.len(), Relaxed);
            if count > 0 && (lines.len() + line.len()) as u64 > self.destination.room_bytes() {
                self.append(&std::mem::take(&mut lines), std::mem::take(&mut count));
            }
            lines.extend_from_slice(line);
            count += 1;
        }
        if count > 0 {
            self.append(&lines, count);
        }
    }

    fn append(&mut self, lines: &[u8], count: usize) {
        let lost = self.shared.lost.swap(0, Relaxed);
        let written = match lost {
            0 => self.destination.append(lines),
            // Programs that bill by this file must see that lines are missing.
            _ => self.destination.append(&[gap(lost).as_bytes(), lines].concat()),
        };
        match written {
            Ok(()) => self.shared.written(count, lost),
            Err(error) => {
                self.shared.is_writable.iter().for_each(|gauge| gauge.set(0));
                self.shared.lost.fetch_add(lost, Relaxed);
                self.shared.lose(count, "write_failed", &error.to_string());
            }
        }
    }
}

/// Waits until the reader of a stream has had its time at the end. The disk of a file has the time
/// of all files.
async fn give_up(stream: Option<String>, stop: &CancellationToken) {
    let Some(file) = stream else { return std::future::pending().await };
    stop.cancelled().await;
    sleep(STREAM_TIMEOUT).await;
    tracing::warn!(file, "the last records are lost: nobody reads them");
}

fn gap(lost: u64) -> String {
    let gap = json!({"version": VERSION, "lost_records": lost, "unix_ms": unix_ms()});
    format!("{gap}\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_telemetry::Metrics;

    fn open(path: &Path, rotate: Rotation) -> (Lines, Metrics) {
        let metrics = Metrics::new().unwrap();
        let records = metrics.ledger_records.clone();
        let writable = &metrics.output_file_writable;
        (Lines::open("ledger", Some(path), rotate, records, writable).unwrap(), metrics)
    }

    #[tokio::test]
    async fn queued_lines_are_written_in_order_before_the_task_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        let (book, metrics) = open(&path, Rotation::default());
        for number in 0..3000 {
            book.write(&json!({ "request_id": number.to_string() }));
        }
        let stop = CancellationToken::new();
        stop.cancel();
        book.take_writer().unwrap().run(stop).await;
        // The writer is gone, so lines are lost and counted.
        book.write(&json!({ "request_id": "late" }));
        let text = std::fs::read_to_string(&path).unwrap();
        let ids: Vec<String> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|line| line["request_id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(ids, (0..3000).map(|number| number.to_string()).collect::<Vec<_>>());
        let count = |result| metrics.ledger_records.with_label_values(&[result]).get();
        assert_eq!((count("written"), count("queue_full")), (3000, 1));
    }

    #[test]
    fn a_failed_write_is_counted_and_the_next_line_says_that_there_is_a_gap() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        let rotate = Rotation { max_bytes: 1, files_max: 1 };
        let (book, metrics) = open(&path, rotate);
        let writable = || metrics.output_file_writable.with_label_values(&["ledger"]).get();
        let mut writer = book.take_writer().unwrap();
        // These lines did not come through the queue.
        book.shared.queued_bytes.store(1000, Relaxed);
        writer.write(&[b"{}\n".to_vec()]);
        // A directory has the name to which the full file would be renamed, so rotation fails.
        std::fs::create_dir_all(folder.path().join("l.1/full")).unwrap();
        writer.write(&[b"{\"lost\":1}\n".to_vec(), b"{\"lost\":2}\n".to_vec()]);
        assert_eq!(metrics.ledger_records.with_label_values(&["write_failed"]).get(), 2);
        assert_eq!(writable(), 0);
        let is_logged = || book.shared.loss_is_logged.load(Relaxed);
        assert!(is_logged());
        std::fs::remove_dir_all(folder.path().join("l.1")).unwrap();
        writer.write(&[b"{\"kept\":3}\n".to_vec()]);
        assert_eq!(writable(), 1);
        assert!(!is_logged(), "the log says that the file is written again");
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["lost_records"], 2);
        assert_eq!(lines[1]["kept"], 3);
    }
}
