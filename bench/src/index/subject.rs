//! An index under measurement: prepared events and queries, and the loops that
//! run over them. One object per index, so that workloads are written once; the
//! loops inside are compiled per index, so that nothing is called indirectly
//! while a clock runs.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::adapters::Adapter;
use super::measure::{Span, run_queue_wait_ns, span};
use super::plan::{Chain, Op, Step};
use super::stall::Stall;

/// Batches end here where an index is too slow for all samples.
const BATCHES_TIME: Duration = Duration::from_millis(200);

/// What a match has to deliver while its clock runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deliver {
    /// The index's own result, whatever its form.
    Result,
    /// Every (worker, overlap) of it, read one by one.
    AllScores,
}

/// What a thread beside the writer looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The index: it looks prompts up.
    Up,
    /// A clock only: what keeps it is the machine.
    AtTheClock,
}

/// What a removed worker cost, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Removal {
    /// Until the last lookup began that named the worker: a lower bound on when
    /// readers stop seeing it.
    pub last_seen_ns: u64,
    /// Until the first lookup of each watched prompt began that did not name the
    /// worker: an upper bound.
    pub unseen_ns: u64,
    /// Until the call had returned and all queued work was done.
    pub returned_ns: u64,
}

/// An index with its prepared work.
pub trait Subject {
    /// Its name in rows.
    fn name(&self) -> &'static str;
    /// Starts over with an empty index; forgets prepared events, keeps queries.
    fn reset(&mut self, workers: u32, max_blocks: usize);
    /// Turns operations into the index's own events, untimed.
    fn prepare_events(&mut self, chains: &[Chain], ops: &[Op]);
    /// Turns prompts into the index's own queries, untimed.
    fn prepare_queries(&mut self, chains: &[Chain]);
    /// Applies all prepared events; returns when readers can see them.
    fn apply_prepared(&mut self) -> Span;
    /// Prepares and applies a few events at a time: for memory figures, where
    /// waiting events must not be counted.
    fn trickle(&mut self, chains: &[Chain], ops: &[Op]);
    /// Looks every query up once, in order; nanoseconds per call.
    fn time_each(&self, overhead_ns: u64, deliver: Deliver, out: &mut Vec<u64>);
    /// Looks one query up `batch` times per sample; nanoseconds times 1,000 per
    /// call, as its mean over the batch.
    fn time_batches(&self, query: usize, batch: u32, samples: u32, deliver: Deliver) -> Vec<u64>;
    /// Per step one lookup and its prepared events; ends when all are visible.
    fn run_steps(&mut self, steps: &[Step]) -> Span;
    /// Applies all prepared events on a thread of their own, as fast as it can,
    /// while this one looks up; nanoseconds per call until the writer is done.
    fn time_contended(&mut self, overhead_ns: u64) -> (Vec<u64>, Span);
    /// All scores of a query, sorted by worker.
    fn scores(&self, query: usize) -> Vec<(u32, u32)>;
    /// Applies all prepared events like [`Subject::time_contended`]; returns how
    /// long that took, and the longest look of the thread beside.
    fn longest_stall(&mut self, look: Look) -> (Span, Stall);
    /// Removes a worker while another thread watches these queries.
    fn remove_worker(&mut self, worker: u32, watched: &[usize]) -> Removal;
    /// Replaces the index with one that was loaded from snapshots of the
    /// workers `0..workers`; the blocks loaded and the time it took.
    fn reload_from_snapshots(&mut self, workers: u32, max_blocks: usize) -> Option<(usize, Span)>;
}

/// One adapter's subject.
pub struct Bench<A: Adapter> {
    index: A,
    events: Vec<A::Event>,
    queries: Vec<A::Query>,
}

impl<A: Adapter> Bench<A> {
    /// With an empty index for one worker.
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

/// Finds out how long the machine kept a polling thread from running.
struct Gaps {
    before: Instant,
    waited_ns: u64,
}

impl Gaps {
    /// Shorter ones are not looked into: asking takes microseconds itself.
    const LEAST: Duration = Duration::from_micros(20);

    fn new() -> Self {
        Self { before: Instant::now(), waited_ns: run_queue_wait_ns() }
    }

    /// Of the time since the last call, that without a processor.
    fn before_this_ns(&mut self) -> u64 {
        let gap = self.before.elapsed();
        let mut lost_ns = 0;
        if gap >= Self::LEAST {
            let waited_ns = run_queue_wait_ns();
            lost_ns = (waited_ns - self.waited_ns).min(gap.as_nanos() as u64);
            self.waited_ns = waited_ns;
        }
        self.before = Instant::now();
        lost_ns
    }
}

/// Ends the readers' loop also where the writer panics.
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

    fn trickle(&mut self, chains: &[Chain], ops: &[Op]) {
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
        (0..samples).take_while(|_| started.elapsed() < BATCHES_TIME).map(sample).collect()
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

    fn longest_stall(&mut self, look: Look) -> (Span, Stall) {
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
                stall = Stall::watch(&done, || match (look, queries.next()) {
                    (Look::Up, Some(query)) => {
                        find::<A>(&reader, query, Deliver::Result, &mut found);
                    }
                    // About as long as a lookup.
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
            assert!(scores.iter().any(|score| score.0 == worker), "watching for nothing");
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
                let mut gaps = Gaps::new();
                watching.store(true, Ordering::Release);
                for &query in watched {
                    // Gone from a prompt, it does not come back to it.
                    let looked_ns = loop {
                        let (looked_ns, gap_ns) = (now_ns(), gaps.before_this_ns());
                        if !sees(query) {
                            break looked_ns.saturating_sub(gap_ns);
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
        // Who looks after the call has returned sees it no more, also where the
        // watcher did not get a processor to look earlier.
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
