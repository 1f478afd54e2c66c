//! The simulation: arrivals and events in order.

use std::collections::VecDeque;

use super::config::{ClusterConfig, InsertAt, Pool};
use super::cost::ns;
use super::decode::LocalPrefill;
use super::events::{Event, EventKind};
use super::outcome::{RequestResult, SimulationResult};
use super::prefill::Part;
use super::router::{Decision, Peer, Placement, Router};
use super::state::Cluster;
use super::workload::Workload;

/// Number of arrivals between two progress reports.
const WATCH_EVERY: usize = 1 << 12;

/// Serves a workload whose requests arrive at the given times, in ascending order. `watch` is
/// called from time to time with the number of requests that have arrived.
///
/// # Panics
/// If the number of times differs from the number of requests.
pub fn run<R: Router>(
    workload: &Workload,
    arrivals_ns: &[u64],
    config: &ClusterConfig,
    router: &mut R,
    watch: &mut dyn FnMut(usize),
) -> SimulationResult {
    assert_eq!(workload.requests().len(), arrivals_ns.len(), "one arrival per request");
    let mut cluster = Cluster::new(workload, config);
    let mut done = Vec::new();
    for (request, arrival_ns) in arrivals_ns.iter().copied().enumerate() {
        while let Some(event) = cluster.events.pop_until(arrival_ns) {
            cluster.handle(event, router, &mut done);
        }
        if request % WATCH_EVERY == 0 {
            watch(request);
        }
        cluster.now_ns = arrival_ns;
        cluster.rows[request].arrival_ns = arrival_ns;
        cluster.arrive(request, router);
    }
    while let Some(event) = cluster.events.pop_until(u64::MAX) {
        cluster.handle(event, router, &mut done);
    }
    // Requests that the router held to the end and never released.
    for row in cluster.rows.iter_mut().filter(|row| row.decode_worker.is_none()) {
        row.rejected = true;
    }
    SimulationResult {
        rows: cluster.rows,
        prefill_busy_ns: cluster.prefill.iter().map(|worker| worker.busy_ns).collect(),
        steps_ns: cluster.decode.into_iter().map(|worker| worker.steps_ns).collect(),
    }
}

impl Cluster<'_> {
    fn handle<R: Router>(&mut self, event: Event, router: &mut R, done: &mut Vec<usize>) {
        self.now_ns = event.at_ns;
        let index = event.index as usize;
        match event.kind {
            EventKind::PrefillEnd => {
                self.prefill_end(index, router, done);
                self.release(router);
            }
            EventKind::Wake => self.start_prefill(index, router),
            EventKind::FetchStart => self.fetch_start(index),
            EventKind::FetchArrive => self.fetch_arrive(index, router),
            EventKind::KvArrive => self.kv_arrive(index),
            EventKind::StepEnd => self.step_end(index, router),
            EventKind::Router => {
                self.router_due_ns = None;
                self.release(router);
            }
        }
    }

    fn arrive<R: Router>(&mut self, request: usize, router: &mut R) {
        if self.config.pool == Pool::Separate {
            let decision = match self.local_worker(request) {
                Some(worker) => Decision::Local(worker),
                None => router.arrive(self, request),
            };
            self.decide(request, decision, router);
            self.release(router);
        } else {
            self.shared_queue.push_back(request);
            self.serve_shared(router);
        }
    }

    /// The decode worker that holds most of the prompt, if that is enough.
    fn local_worker(&self, request: usize) -> Option<usize> {
        let threshold = self.config.local_threshold?;
        let (worker, hits) = self.best_decode_holder(request);
        let blocks = self.workload.requests()[request].blocks;
        (f64::from(hits) >= threshold * f64::from(blocks)).then_some(worker)
    }

    fn release<R: Router>(&mut self, router: &mut R) {
        while let Some((request, decision)) = router.release(self) {
            self.decide(request, decision, router);
        }
        // One event at a time: for the earliest requested time.
        if let Some(due_ns) = router.due_ns()
            && self.router_due_ns.is_none_or(|known_ns| due_ns < known_ns)
        {
            let due_ns = due_ns.max(self.now_ns + 1);
            self.router_due_ns = Some(due_ns);
            self.events.push(due_ns, EventKind::Router, 0);
        }
    }

    fn decide<R: Router>(&mut self, request: usize, decision: Decision, router: &mut R) {
        match decision {
            Decision::Prefill(placement) => {
                let waiting = self.waiting_requests(placement.worker);
                if self.config.max_queue.is_some_and(|most| waiting >= most) {
                    self.rows[request].rejected = true;
                } else {
                    self.enqueue(request, placement, router);
                }
            }
            Decision::Local(worker) => self.enqueue_local(request, Placement::on(worker), router),
            Decision::LocalFetching(placement) => self.enqueue_local(request, placement, router),
            Decision::Hold => {}
            Decision::Reject => self.rows[request].rejected = true,
        }
    }

    fn enqueue<R: Router>(&mut self, request: usize, placement: Placement, router: &mut R) {
        let Placement { worker, fetch_blocks, fetch_ready_ns, fetch_from } = placement;
        self.note_place(request, self.overlap_blocks(worker, request));
        let row = &mut self.rows[request];
        row.prefill_worker = Some(worker as u32);
        row.fetch_blocks = fetch_blocks;
        row.fetch_ready_ns = fetch_ready_ns;
        row.fetch_from = fetch_from;
        let input = self.workload.requests()[request].input_tokens;
        self.prefill[worker].outstanding_requests += 1;
        self.prefill[worker].outstanding_tokens += u64::from(input);
        self.prefill[worker].waiting.push_back(request);
        if let Some(from) = fetch_from {
            self.fetch(request, Peer::Prefill(worker), from);
        } else if fetch_ready_ns > self.now_ns {
            self.events.push(fetch_ready_ns, EventKind::Wake, worker);
        }
        router.placed(self, request);
        self.start_prefill(worker, router);
    }

    /// Records what caches hold of a request when it is placed.
    fn note_place(&mut self, request: usize, chosen_blocks: u32) {
        let held = (0..self.caches.len()).map(|worker| self.overlap_blocks(worker, request)).max();
        let row = &mut self.rows[request];
        row.placed_ns = self.now_ns;
        row.chosen_blocks = chosen_blocks;
        row.held_blocks = held.unwrap_or(0).max(chosen_blocks);
    }

    /// Starts an iteration if the worker is idle and has a request that may start.
    fn start_prefill<R: Router>(&mut self, worker: usize, router: &mut R) {
        if self.prefill[worker].busy_until_ns.is_some() {
            return;
        }
        let mut budget = self.config.budget_tokens.unwrap_or(u32::MAX).max(1);
        let one_at_a_time = self.config.budget_tokens.is_none();
        let mut span_s = 0.0;
        let mut index = 0;
        while budget > 0 && !(one_at_a_time && index == 1) {
            if index == self.prefill[worker].parts.len() {
                let next = self.prefill[worker].next(&self.rows, self.now_ns);
                let Some(request) = next else { break };
                let hits = self.begin_prefill(worker, request);
                let done_tokens = self.workload.cached_tokens(request, hits);
                self.prefill[worker].parts.push(Part { request, done_tokens, tokens: 0 });
                router.prefill_started(self, request);
            }
            let part = &mut self.prefill[worker].parts[index];
            let input = self.workload.requests()[part.request].input_tokens;
            part.tokens = (input - part.done_tokens).min(budget);
            budget -= part.tokens;
            span_s += self.config.cost.span_s(part.tokens, part.done_tokens);
            index += 1;
        }
        if index > 0 {
            let slowness = self.config.prefill_slowness.get(worker).copied().unwrap_or(1.0);
            let duration = ns((self.config.cost.prefill_base_s + span_s) * slowness);
            self.prefill[worker].busy_ns += duration;
            self.prefill[worker].busy_until_ns = Some(self.now_ns + duration);
            self.events.push(self.now_ns + duration, EventKind::PrefillEnd, worker);
        }
    }

    /// Determines what a request finds in the cache; returns the number of leading blocks.
    fn begin_prefill(&mut self, worker: usize, request: usize) -> u32 {
        let blocks = self.workload.blocks(request);
        let cache = &mut self.caches[if self.config.pool == Pool::Separate { worker } else { 0 }];
        let held = cache.leading(blocks);
        cache.start(request, blocks, held);
        if self.config.insert_at == InsertAt::Start {
            cache.insert(blocks);
        }
        let row = &mut self.rows[request];
        // What was fetched over the links is in the cache, unless it was evicted meanwhile.
        row.hit_blocks = if row.fetch_from.is_some() { held } else { held.max(row.fetch_blocks) };
        row.fetched_blocks = row.hit_blocks.min(row.fetch_blocks).saturating_sub(row.chosen_blocks);
        row.prefill_start_ns = self.now_ns;
        row.hit_blocks
    }

    fn prefill_end<R: Router>(&mut self, worker: usize, router: &mut R, done: &mut Vec<usize>) {
        done.clear();
        self.prefill[worker].end_iteration(self.workload, done);
        let cache = if self.config.pool == Pool::Separate { worker } else { 0 };
        for request in done.iter().copied() {
            let input = self.workload.requests()[request].input_tokens;
            self.caches[cache].insert(self.workload.blocks(request));
            self.prefill[worker].outstanding_requests -= 1;
            self.prefill[worker].outstanding_tokens -= u64::from(input);
            self.rows[request].prefill_end_ns = self.now_ns;
            router.prefill_ended(self, request);
            self.hand_off(worker, self.least_loaded_decode_worker(), request);
        }
        self.start_prefill(worker, router);
        if self.config.pool != Pool::Separate {
            self.serve_shared(router);
        }
    }

    /// Sends the part of a prompt's KV that a decode worker lacks.
    fn hand_off(&mut self, from: usize, to: usize, request: usize) {
        let blocks = self.workload.blocks(request);
        let input = self.workload.requests()[request].input_tokens;
        let decode = &mut self.decode[to];
        let held = decode.cache.leading(blocks);
        decode.cache.touch(&blocks[..held as usize]);
        decode.assigned_tokens += u64::from(input);
        let held_tokens = u64::from(held) * u64::from(self.workload.block_tokens());
        let lacking = input - held_tokens.min(u64::from(input)) as u32;
        let cost = &self.config.cost;
        let (sender, receiver) = (Peer::Prefill(from), Peer::Decode(to));
        let ready_ns = if self.config.contention {
            let base_s = cost.transfer_base_s;
            self.links.transfer((sender, receiver), lacking, base_s, self.now_ns, cost).1
        } else {
            // Fetches wait for hand-offs, which wait for nothing.
            self.links.occupy(sender, lacking, self.now_ns, cost);
            self.now_ns + cost.transfer_ns(lacking)
        };
        let row = &mut self.rows[request];
        row.decode_worker = Some(to as u32);
        row.moved_tokens = lacking;
        row.kv_ready_ns = ready_ns;
        self.events.push(ready_ns, EventKind::KvArrive, request);
    }

    /// Requests a fetch, which takes its turn on the links of both workers.
    fn fetch(&mut self, request: usize, to: Peer, from: Peer) {
        let RequestResult { fetch_blocks, chosen_blocks, .. } = self.rows[request];
        let cached = |blocks| self.workload.cached_tokens(request, blocks);
        let tokens = cached(fetch_blocks).saturating_sub(cached(chosen_blocks));
        let (cost, now_ns) = (&self.config.cost, self.now_ns);
        let base_s = cost.fetch_base_s;
        let (start_ns, ready_ns) = self.links.transfer((from, to), tokens, base_s, now_ns, cost);
        self.rows[request].fetch_ready_ns = ready_ns;
        self.events.push(start_ns, EventKind::FetchStart, request);
        self.events.push(ready_ns, EventKind::FetchArrive, request);
    }

    /// Determines what the sender still holds. The transfer takes its time on the links even if that
    /// is less than what was requested.
    fn fetch_start(&mut self, request: usize) {
        let Some(from) = self.rows[request].fetch_from else { return };
        let blocks = self.workload.blocks(request);
        let held = self.peer_overlap_blocks(from, request);
        let sent = self.rows[request].fetch_blocks.min(held);
        self.rows[request].fetch_blocks = sent;
        match from {
            Peer::Prefill(worker) => self.caches[worker].start(request, blocks, sent),
            Peer::Decode(worker) => self.decode[worker].cache.touch(&blocks[..sent as usize]),
        }
    }

    fn fetch_arrive<R: Router>(&mut self, request: usize, router: &mut R) {
        let RequestResult { prefill_worker, decode_worker, fetch_blocks, .. } = self.rows[request];
        let blocks = &self.workload.blocks(request)[..fetch_blocks as usize];
        if let Some(worker) = prefill_worker.map(|worker| worker as usize) {
            self.caches[worker].insert(blocks);
            self.start_prefill(worker, router);
        } else if let Some(worker) = decode_worker.map(|worker| worker as usize) {
            self.decode[worker].cache.insert(blocks, drop);
            self.await_step(request, worker);
        }
    }

    /// The idle workers of a pool, lowest first, take requests from its queue.
    fn serve_shared<R: Router>(&mut self, router: &mut R) {
        while !self.shared_queue.is_empty() {
            let idle = self.prefill.iter().position(|worker| worker.busy_until_ns.is_none());
            let Some(worker) = idle else { return };
            let place = match self.config.pool {
                Pool::SharedShortestFirst => self.shortest(&self.shared_queue),
                _ => 0,
            };
            let Some(request) = self.shared_queue.remove(place) else { return };
            self.enqueue(request, Placement::on(worker), router);
        }
    }

    fn shortest(&self, queue: &VecDeque<usize>) -> usize {
        let prefill_ns = |request: usize| {
            let hits = self.caches[0].leading(self.workload.blocks(request));
            let input = self.workload.requests()[request].input_tokens;
            self.config.cost.prefill_ns(input, self.workload.cached_tokens(request, hits))
        };
        let all = queue.iter().map(|request| prefill_ns(*request)).enumerate();
        all.min_by_key(|(_, prefill_ns)| *prefill_ns).map_or(0, |(place, _)| place)
    }

    fn enqueue_local<R: Router>(&mut self, request: usize, placement: Placement, router: &mut R) {
        let Placement { worker, fetch_blocks, fetch_from, .. } = placement;
        let input = self.workload.requests()[request].input_tokens;
        self.note_place(request, self.decode_overlap_blocks(worker, request));
        self.rows[request].decode_worker = Some(worker as u32);
        self.decode[worker].assigned_tokens += u64::from(input);
        if let Some(from) = fetch_from {
            self.rows[request].fetch_blocks = fetch_blocks;
            self.rows[request].fetch_from = fetch_from;
            self.fetch(request, Peer::Decode(worker), from);
            return router.placed(self, request);
        }
        router.placed(self, request);
        self.await_step(request, worker);
    }

    /// A request waits for its decode worker, which is woken if it does nothing.
    fn await_step(&mut self, request: usize, worker: usize) {
        self.decode[worker].waiting.push_back(request);
        if !self.decode[worker].stepping {
            self.start_step(worker);
        }
    }

    fn kv_arrive(&mut self, request: usize) {
        let Some(worker) = self.rows[request].decode_worker else { return };
        let decode = &mut self.decode[worker as usize];
        decode.cache.insert(self.workload.blocks(request), drop);
        self.await_step(request, worker as usize);
    }

    /// Admits waiting requests that fit, and starts a step unless there is nothing to do.
    fn start_step(&mut self, worker: usize) {
        let config = self.config;
        let decode = &mut self.decode[worker];
        decode.stepping = false;
        while let Some(id) = decode.waiting.front().copied() {
            let request = &self.workload.requests()[id];
            if !decode.fits(request, config.kv_capacity_tokens, config.max_batch) {
                break;
            }
            decode.waiting.pop_front();
            decode.admit(request);
            if self.rows[id].prefill_worker.is_some() {
                decode.join(id, request);
            } else {
                let local = LocalPrefill { request: id, done_tokens: None, tokens: 0 };
                decode.local.push_back(local);
            }
        }
        let prefill_s = self.next_chunk_s(worker);
        let decode = &mut self.decode[worker];
        if decode.members == 0 {
            return;
        }
        let duration = ns(decode.step_s(&config.cost, prefill_s, config.interference));
        decode.stepping = true;
        decode.steps_ns.push(duration);
        self.events.push(self.now_ns + duration, EventKind::StepEnd, worker);
    }

    /// Seconds of the next chunk of the current local prefill; 0 if there is none.
    fn next_chunk_s(&mut self, worker: usize) -> f64 {
        let config = self.config;
        let decode = &mut self.decode[worker];
        let Some(local) = decode.local.front_mut() else { return 0.0 };
        let input = self.workload.requests()[local.request].input_tokens;
        let mut base_s = 0.0;
        let done = local.done_tokens.unwrap_or_else(|| {
            let blocks = self.workload.blocks(local.request);
            let hits = decode.cache.leading(blocks);
            decode.cache.touch(&blocks[..hits as usize]);
            let row = &mut self.rows[local.request];
            row.hit_blocks = hits;
            row.fetched_blocks = hits.min(row.fetch_blocks).saturating_sub(row.chosen_blocks);
            row.prefill_start_ns = self.now_ns;
            base_s = config.cost.prefill_base_s;
            self.workload.cached_tokens(local.request, hits)
        });
        let chunk = if config.chunk_tokens == 0 { u32::MAX } else { config.chunk_tokens };
        local.done_tokens = Some(done);
        local.tokens = (input - done).min(chunk);
        base_s + config.cost.span_s(local.tokens, done)
    }

    fn step_end<R: Router>(&mut self, worker: usize, router: &mut R) {
        let decode = &mut self.decode[worker];
        decode.context_tokens += u64::from(decode.batch);
        let step = decode.steps_ns.len() - 1;
        for request in std::mem::take(&mut decode.joined) {
            self.rows[request].first_step = step as u32;
            self.rows[request].first_token_ns = self.now_ns;
            router.first_token(self, request);
        }
        while let Some(request) = self.decode[worker].pop_ended(self.workload.requests()) {
            self.rows[request].last_token_ns = self.now_ns;
        }
        self.end_chunk(worker, router);
        self.start_step(worker);
    }

    /// Counts the step's chunk of a local prefill, whose request joins the batch when it is
    /// complete.
    fn end_chunk<R: Router>(&mut self, worker: usize, router: &mut R) {
        let decode = &mut self.decode[worker];
        let Some(local) = decode.local.front_mut() else { return };
        let LocalPrefill { request: id, tokens, .. } = *local;
        let request = &self.workload.requests()[id];
        let done = local.done_tokens.unwrap_or(0) + tokens;
        local.done_tokens = Some(done);
        if done < request.input_tokens {
            return;
        }
        decode.local.pop_front();
        decode.cache.insert(self.workload.blocks(id), drop);
        decode.join(id, request);
        let row = &mut self.rows[id];
        row.prefill_end_ns = self.now_ns;
        row.kv_ready_ns = self.now_ns;
        router.prefill_ended(self, id);
    }
}
