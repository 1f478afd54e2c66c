//! References that know the future of the queues.
//!
//! A prefill worker that serves one request after the other changes its cache in the order of its
//! queue. Applying the same changes to a copy when a request is placed gives the exact time at
//! which the worker is free and the exact cache that the next request finds.

use splitrail_sim::cluster::{Cluster, Decision, InsertAt, Lru, Placement, Router, cost::ns};

/// Additional weight of the prefill's own time, if later requests count.
const BETA: f64 = 4.0;
/// Weight of the blocks that an insertion would evict.
const GAMMA: f64 = 1.0;
/// The time in seconds after which an unused block keeps 37 % of its value.
const TAU_S: f64 = 300.0;
/// The relative value of a block that was inserted only once.
const ONCE: f64 = 0.3;

/// The state of a worker after everything that was sent to it.
#[derive(Debug)]
struct ProjectedState {
    cache: Lru,
    free_ns: u64,
    inserts: Vec<u32>,
    touched_ns: Vec<u64>,
}

/// Places requests by the exact projection of every queue.
#[derive(Debug)]
pub struct OracleRouter {
    /// Whether later requests count: additional work, and the blocks that an insertion evicts.
    look_ahead: bool,
    fetch: bool,
    projected: Vec<ProjectedState>,
    /// By block: number of projected caches that hold it.
    holders: Vec<u32>,
    /// By request: when it will start, and with how many hits.
    expected: Vec<(u64, u32)>,
    /// Marks the blocks of the current request.
    marked: Vec<u32>,
}

impl OracleRouter {
    /// Creates a router with its options.
    pub fn new(look_ahead: bool, fetch: bool) -> Self {
        Self {
            look_ahead,
            fetch,
            projected: Vec::new(),
            holders: Vec::new(),
            expected: Vec::new(),
            marked: Vec::new(),
        }
    }

    fn prepare(&mut self, cluster: &Cluster<'_>) {
        if !self.projected.is_empty() {
            return;
        }
        let blocks = cluster.workload().distinct_blocks();
        let capacity = cluster.config().prefill_cache_blocks;
        self.projected.extend((0..cluster.prefill_workers()).map(|_| ProjectedState {
            cache: Lru::new(blocks, capacity),
            free_ns: 0,
            inserts: vec![0; blocks as usize],
            touched_ns: vec![0; blocks as usize],
        }));
        self.holders = vec![0; blocks as usize];
        self.marked = vec![u32::MAX; blocks as usize];
        self.expected = vec![(0, 0); cluster.workload().requests().len()];
    }

    /// The placement with the lowest cost; the first of equal ones.
    fn best(&mut self, cluster: &Cluster<'_>, request: usize) -> Placement {
        let workload = cluster.workload();
        let blocks = workload.blocks(request);
        let cost = &cluster.config().cost;
        let now_ns = cluster.now_ns();
        let source = match self.fetch {
            true => (0..cluster.prefill_workers())
                .map(|worker| cluster.overlap_blocks(worker, request))
                .max()
                .unwrap_or(0),
            false => 0,
        };
        blocks.iter().for_each(|block| self.marked[*block as usize] = request as u32);
        let weight = if self.look_ahead { 1.0 + BETA } else { 1.0 };
        let prefill_ns = |hits| {
            let input = workload.requests()[request].input_tokens;
            cost.prefill_ns(input, workload.cached_tokens(request, hits))
        };
        let mut best = (f64::INFINITY, Placement::default());
        for worker in 0..self.projected.len() {
            let projected = &self.projected[worker];
            let wait_ns = projected.free_ns.saturating_sub(now_ns);
            let hits = projected.cache.leading(blocks);
            let mut option =
                (wait_ns as f64 + weight * prefill_ns(hits) as f64, Placement::on(worker));
            if source > hits {
                let cached = |blocks| workload.cached_tokens(request, blocks);
                let fetch_ns = cost.transfer_ns(cached(source) - cached(hits));
                let start_ns = wait_ns.max(fetch_ns) as f64;
                let with_fetch = start_ns + weight * prefill_ns(source) as f64;
                if with_fetch < option.0 {
                    let fetch_ready_ns = now_ns + fetch_ns;
                    let placement = Placement {
                        worker,
                        fetch_blocks: source,
                        fetch_ready_ns,
                        fetch_from: None,
                    };
                    option = (with_fetch, placement);
                }
            }
            if self.look_ahead {
                option.0 += GAMMA * self.pushed_out_ns(cluster, worker, request);
            }
            if option.0 < best.0 {
                best = option;
            }
        }
        best.1
    }

    /// The value of the blocks that the request would evict and that no other worker holds, in
    /// nanoseconds of computing them.
    fn pushed_out_ns(&self, cluster: &Cluster<'_>, worker: usize, request: usize) -> f64 {
        let blocks = cluster.workload().blocks(request);
        let (cost, now_ns) = (&cluster.config().cost, cluster.now_ns());
        let ProjectedState { cache, inserts, touched_ns, .. } = &self.projected[worker];
        let taken = &blocks[..blocks.len().min(cache.capacity())];
        let new = taken.iter().filter(|block| !cache.holds(**block)).count();
        let surplus = (cache.len() + new).saturating_sub(cache.capacity());
        let block_s = f64::from(cluster.workload().block_tokens()) * cost.prefill_token_s;
        let others = cache.oldest_first().filter(|b| self.marked[*b as usize] != request as u32);
        let worth =
            others.take(surplus).filter(|block| self.holders[*block as usize] <= 1).map(|block| {
                let value = if inserts[block as usize] > 1 { 1.0 } else { ONCE };
                let age_s = now_ns.saturating_sub(touched_ns[block as usize]) as f64 / 1e9;
                block_s * value * (-age_s / TAU_S).exp()
            });
        worth.sum::<f64>() * 1e9
    }

    /// Applies to the projection what the queue will do.
    fn project(&mut self, cluster: &Cluster<'_>, request: usize, placement: Placement) {
        let workload = cluster.workload();
        let blocks = workload.blocks(request);
        let ProjectedState { cache, free_ns, inserts, touched_ns } =
            &mut self.projected[placement.worker];
        let start_ns = (*free_ns).max(cluster.now_ns()).max(placement.fetch_ready_ns);
        let held = cache.leading(blocks);
        let hits = held.max(placement.fetch_blocks);
        let input = workload.requests()[request].input_tokens;
        let slowness = cluster.config().prefill_slowness.get(placement.worker).copied();
        let cost = &cluster.config().cost;
        let cached = workload.cached_tokens(request, hits);
        let span_s = cost.span_s(input - cached, cached);
        *free_ns = start_ns + ns((cost.prefill_base_s + span_s) * slowness.unwrap_or(1.0));
        self.expected[request] = (start_ns, hits);
        cache.touch(&blocks[..held as usize]);
        let times = match cluster.config().insert_at {
            InsertAt::End => 1,
            InsertAt::Start => 2,
        };
        for block in &blocks[..blocks.len().min(cache.capacity())] {
            inserts[*block as usize] += 1;
            touched_ns[*block as usize] = *free_ns;
            self.holders[*block as usize] += u32::from(!cache.holds(*block));
        }
        for _ in 0..times {
            cache.insert(blocks, |block| self.holders[block as usize] -= 1);
        }
    }
}

impl Router for OracleRouter {
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision {
        self.prepare(cluster);
        Decision::Prefill(self.best(cluster, request))
    }

    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        let row = cluster.row(request);
        if let Some(worker) = row.prefill_worker {
            let (fetch_blocks, fetch_ready_ns) = (row.fetch_blocks, row.fetch_ready_ns);
            let worker = worker as usize;
            let placement = Placement { worker, fetch_blocks, fetch_ready_ns, fetch_from: None };
            self.project(cluster, request, placement);
        }
    }

    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        let row = cluster.row(request);
        let happens = (row.prefill_start_ns, row.hit_blocks);
        assert_eq!(happens, self.expected[request], "the projection of request {request} is exact");
    }
}
