//! An index with its prepared events and queries, and the loops that measure it. Workloads use all
//! indexes through one trait object each. The loops are compiled for each index, so that no
//! indirect call is made while time is measured.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::adapters::Adapter;
use super::measure::{Span, run_queue_wait_ns, span};
use super::plan::{Chain, Op, Step};
use super::stall::Stall;

/// Maximum time for the batches of one call of [`Subject::time_batches`]. A slow index gets fewer
/// samples.
const BATCHES_TIMEOUT: Duration = Duration::from_millis(200);

/// The part of a lookup that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deliver {
    /// Until the index's own result is there, in any form.
    Result,
    /// Until every worker and overlap of the result has been read.
    AllScores,
}

/// What the reading thread does while another thread writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// It looks up prompts in the index.
    Index,
    /// It only reads a clock, so that all its delays are caused by the machine.
    Clock,
}

/// The times of the removal of a worker, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Removal {
    /// Until the start of the last lookup that found the worker: a lower bound of the time until
    /// readers no longer find the worker.
    pub last_seen_ns: u64,
    /// Until, for each watched prompt, a lookup started that did not find the worker: an upper
    /// bound.
    pub unseen_ns: u64,
    /// Until the call has returned and all queued work is done.
    pub returned_ns: u64,
}

/// An index with its prepared events and queries.
pub trait Subject {
    /// The name of the index in rows.
    fn name(&self) -> &'static str;
    /// Replaces the index with an empty one. Drops prepared events and keeps prepared queries.
    fn reset(&mut self, workers: u32, max_blocks: usize);
    /// Converts operations to the index's own events. This is not measured.
    fn prepare_events(&mut self, chains: &[Chain], ops: &[Op]);
    /// Converts prompts to the index's own queries. This is not measured.
    fn prepare_queries(&mut self, chains: &[Chain]);
    /// Applies all prepared events, and waits until they are visible to readers.
    fn apply_prepared(&mut self) -> Span;
    /// Prepares and applies a few events at a time, so that prepared events do not count in memory
    /// figures.
    fn apply_in_parts(&mut self, chains: &[Chain], ops: &[Op]);
    /// Looks up every query once, in order. Appends the time of each call in nanoseconds to `out`.
    fn time_each(&self, overhead_ns: u64, deliver: Deliver, out: &mut Vec<u64>);
    /// Looks up one query `batch` times per sample. Each sample is the mean time of a call in
    /// picoseconds.
    fn time_batches(&self, query: usize, batch: u32, samples: u32, deliver: Deliver) -> Vec<u64>;
    /// For each step, looks up its query and applies its prepared events. Waits until all events
    /// are visible.
    fn run_steps(&mut self, steps: &[Step]) -> Span;
    /// Looks up queries while another thread applies all prepared events as fast as it can. Returns
    /// the time of each lookup in nanoseconds, and the duration of the whole.
    fn time_contended(&mut self, overhead_ns: u64) -> (Vec<u64>, Span);
    /// The result of a query: workers with their overlaps in blocks, sorted by worker.
    fn scores(&self, query: usize) -> Vec<(u32, u32)>;
    /// Applies all prepared events on another thread while this thread reads. Returns the duration
    /// of the whole, and the longest delay of this thread.
    fn longest_stall(&mut self, reading: Reading) -> (Span, Stall);
    /// Removes a worker while another thread looks up the queries in `watched`.
    fn remove_worker(&mut self, worker: u32, watched: &[usize]) -> Removal;
    /// Replaces the index with one that is loaded from snapshots of the workers `0..workers`.
    /// Returns the number of loaded blocks and the duration; `None` if the index cannot load
    /// snapshots.
    fn reload_from_snapshots(&mut self, workers: u32, max_blocks: usize) -> Option<(usize, Span)>;
}

/// The [`Subject`] of an adapter.
pub struct Bench<A: Adapter> {
    index: A,
    events: Vec<A::Event>,
    queries: Vec<A::Query>,
}

impl<A: Adapter> Bench<A> {
    /// A subject with an empty index for one worker.
    pub fn new() -> Self {
        Self { index: A::new(1, 1), events: Vec::new(), queries: Vec::new() }
    }
}

impl<A: Adapter> Default for Bench<A> {
    fn default() -> Self {
        Self::new()
    }
}

fn event<A: Adapter>(chains: &[Chain], op: &Op) -> A::Event {
    match op {
        Op::Store { worker, parent, chain, from, to } => {
            let blocks = &chains[*chain as usize][*from as usize..*to as usize];
            A::store_event(*worker, *parent, blocks)
        }
        Op::Remove { worker, engines } => A::remove_event(*worker, engines),
    }
}

fn find<A: Adapter>(reader: &A::Reader, query: &A::Query, deliver: Deliver, found: &mut A::Found) {
    A::find(reader, query, found);
    if deliver == Deliver::AllScores {
        let mut sum = 0_u64;
        A::each_score(found, |worker, blocks| sum += u64::from(worker ^ blocks));
        black_box(sum);
    }
    black_box(found);
}

fn scores<A: Adapter>(reader: &A::Reader, query: &A::Query) -> Vec<(u32, u32)> {
    let mut found = A::Found::default();
    A::find(reader, query, &mut found);
    let mut scores = Vec::new();
    A::each_score(&found, |worker, blocks| scores.push((worker, blocks)));
    scores.retain(|&(_, blocks)| blocks > 0);
    scores.sort_unstable();
    scores
}

/// Measures for how long a polling thread had no processor.
struct WaitingTime {
    /// The last call.
    last: Instant,
    /// The waiting time of the thread at the last read.
    waited_ns: u64,
}

impl WaitingTime {
    /// Minimum time since the last call for which the waiting time is read, because a read takes
    /// microseconds.
    const MIN_GAP: Duration = Duration::from_micros(20);

    fn new() -> Self {
        Self { last: Instant::now(), waited_ns: run_queue_wait_ns() }
    }

    /// The part of the time since the last call for which the thread had no processor, in
    /// nanoseconds.
    fn since_last_call_ns(&mut self) -> u64 {
        let gap = self.last.elapsed();
        let mut lost_ns = 0;
        if gap >= Self::MIN_GAP {
            let waited_ns = run_queue_wait_ns();
            lost_ns = (waited_ns - self.waited_ns).min(gap.as_nanos() as u64);
            self.waited_ns = waited_ns;
        }
        self.last = Instant::now();
        lost_ns
    }
}

/// Ends the loop of the reader when it is dropped, even if the writer panics.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl<A: Adapter> Subject for Bench<A> {
    fn name(&self) -> &'static str {
        A::NAME
    }

    fn reset(&mut self, workers: u32, max_blocks: usize) {
        self.events = Vec::new();
        self.index = A::new(workers, max_blocks);
    }

    fn prepare_events(&mut self, chains: &[Chain], ops: &[Op]) {
        self.events = ops.iter().map(|op| event::<A>(chains, op)).collect();
    }

    fn prepare_queries(&mut self, chains: &[Chain]) {
        self.queries = chains.iter().map(|chain| A::query(chain)).collect();
    }

    fn apply_prepared(&mut self) -> Span {
        let events = std::mem::take(&mut self.events);
        span(|| {
            events.into_iter().for_each(|event| self.index.apply(event));
            self.index.flush();
        })
    }

    fn apply_in_parts(&mut self, chains: &[Chain], ops: &[Op]) {
        for ops in ops.chunks(64) {
            ops.iter().for_each(|op| self.index.apply(event::<A>(chains, op)));
            self.index.flush();
        }
    }

    fn time_each(&self, overhead_ns: u64, deliver: Deliver, out: &mut Vec<u64>) {
        let reader = self.index.reader();
        let mut found = A::Found::default();
        for query in &self.queries {
            let start = Instant::now();
            find::<A>(&reader, query, deliver, &mut found);
            out.push((start.elapsed().as_nanos() as u64).saturating_sub(overhead_ns));
        }
    }

    fn time_batches(&self, query: usize, batch: u32, samples: u32, deliver: Deliver) -> Vec<u64> {
        let reader = self.index.reader();
        let query = &self.queries[query];
        let mut found = A::Found::default();
        let sample = |_| {
            let start = Instant::now();
            for _ in 0..batch {
                find::<A>(&reader, black_box(query), deliver, &mut found);
            }
            start.elapsed().as_nanos() as u64 * 1000 / u64::from(batch)
        };
        let started = Instant::now();
        (0..samples).take_while(|_| started.elapsed() < BATCHES_TIMEOUT).map(sample).collect()
    }

    fn run_steps(&mut self, steps: &[Step]) -> Span {
        let reader = self.index.reader();
        let mut found = A::Found::default();
        let mut events = std::mem::take(&mut self.events).into_iter();
        span(|| {
            for step in steps {
                let query = &self.queries[step.query as usize];
                find::<A>(&reader, query, Deliver::Result, &mut found);
                for event in events.by_ref().take(step.events as usize) {
                    self.index.apply(event);
                }
            }
            self.index.flush();
        })
    }

    fn time_contended(&mut self, overhead_ns: u64) -> (Vec<u64>, Span) {
        let events = std::mem::take(&mut self.events);
        let (index, queries) = (&mut self.index, &self.queries);
        let reader = index.reader();
        let done = AtomicBool::new(false);
        let mut found = A::Found::default();
        let mut samples = Vec::with_capacity(1 << 20);
        let span = span(|| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _done = SetOnDrop(&done);
                    events.into_iter().for_each(|event| index.apply(event));
                    index.flush();
                });
                for query in queries.iter().cycle() {
                    if done.load(Ordering::Acquire) {
                        break;
                    }
                    let start = Instant::now();
                    find::<A>(&reader, query, Deliver::Result, &mut found);
                    samples.push((start.elapsed().as_nanos() as u64).saturating_sub(overhead_ns));
                }
            });
        });
        (samples, span)
    }

    fn longest_stall(&mut self, reading: Reading) -> (Span, Stall) {
        let events = std::mem::take(&mut self.events);
        let (index, queries) = (&mut self.index, &self.queries);
        let reader = index.reader();
        let done = AtomicBool::new(false);
        let mut found = A::Found::default();
        let mut queries = queries.iter().cycle();
        let mut stall = Stall::default();
        let span = span(|| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _done = SetOnDrop(&done);
                    events.into_iter().for_each(|event| index.apply(event));
                    index.flush();
                });
                stall = Stall::watch(&done, || match (reading, queries.next()) {
                    (Reading::Index, Some(query)) => {
                        find::<A>(&reader, query, Deliver::Result, &mut found);
                    }
                    // This takes about as long as a lookup.
                    _ => (0..8).for_each(|_| _ = black_box(Instant::now())),
                });
            });
        });
        (span, stall)
    }

    fn scores(&self, query: usize) -> Vec<(u32, u32)> {
        scores::<A>(&self.index.reader(), &self.queries[query])
    }

    fn remove_worker(&mut self, worker: u32, watched: &[usize]) -> Removal {
        let reader = self.index.reader();
        let (index, queries) = (&mut self.index, &self.queries);
        let epoch = Instant::now();
        let now_ns = || epoch.elapsed().as_nanos() as u64;
        for &query in watched {
            let scores = scores::<A>(&reader, &queries[query]);
            assert!(
                scores.iter().any(|score| score.0 == worker),
                "a watched prompt is not held by the worker"
            );
        }
        let watching = AtomicBool::new(false);
        let (last_seen_ns, unseen_at_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        let (start_ns, end_ns) = thread::scope(|scope| {
            scope.spawn(|| {
                let mut found = A::Found::default();
                let mut sees = |query: usize| {
                    A::find(&reader, &queries[query], &mut found);
                    A::score_of(&found, worker) > 0
                };
                let mut waiting_time = WaitingTime::new();
                watching.store(true, Ordering::Release);
                for &query in watched {
                    // Once the worker is not found for a prompt, it is never found for it again.
                    let looked_ns = loop {
                        let (looked_ns, lost_ns) = (now_ns(), waiting_time.since_last_call_ns());
                        if !sees(query) {
                            break looked_ns.saturating_sub(lost_ns);
                        }
                        last_seen_ns.store(looked_ns, Ordering::Relaxed);
                    };
                    unseen_at_ns.fetch_max(looked_ns, Ordering::Relaxed);
                }
            });
            while !watching.load(Ordering::Acquire) {
                thread::yield_now();
            }
            let start_ns = now_ns();
            index.remove_worker(worker);
            index.flush();
            (start_ns, now_ns())
        });
        // The worker is not found after the call has returned. The clamp covers a watching thread
        // that got no processor earlier.
        let unseen_at_ns = unseen_at_ns.into_inner().clamp(start_ns, end_ns);
        Removal {
            last_seen_ns: last_seen_ns.into_inner().saturating_sub(start_ns),
            unseen_ns: unseen_at_ns - start_ns,
            returned_ns: end_ns - start_ns,
        }
    }

    fn reload_from_snapshots(&mut self, workers: u32, max_blocks: usize) -> Option<(usize, Span)> {
        let snapshots = self.index.snapshots(workers);
        self.reset(workers, max_blocks);
        let mut loaded = None;
        let span = span(|| loaded = self.index.load_snapshots(snapshots));
        loaded.map(|blocks| (blocks, span))
    }
}
