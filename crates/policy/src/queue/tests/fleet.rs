//! Simulated workers that serve a queue, and a naive round to compare with.

use std::collections::{HashMap, HashSet};

use crate::candidate::Leg;
use crate::index::CandidateIndex;
use crate::kv_format::KvFormat;
use crate::policy::Policy;
use crate::queue::*;

pub(super) const BLOCK: u64 = 512;
pub(super) const MS: u64 = 1_000_000;

/// A prompt as the names of its blocks. The key of a request is its position in `Fleet::prompts`.
pub(super) type Prompt = Vec<u64>;

/// Workers that compute one prompt after the other and keep all of their blocks.
pub(super) struct Fleet {
    pub(super) prompts: Vec<Prompt>,
    pub(super) free_at_ns: Vec<u64>,
    pub(super) held: Vec<HashSet<u64>>,
    pub(super) up: Vec<bool>,
    /// The workers that must not serve a request, by its key; none without an entry.
    pub(super) excluded: HashMap<usize, Vec<usize>>,
    /// Whether workers fetch prefixes from each other.
    pub(super) fetches: bool,
    pub(super) policy: Policy,
    pub(super) now_ns: u64,
}

impl Fleet {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            prompts: Vec::new(),
            free_at_ns: vec![0; workers],
            held: vec![HashSet::new(); workers],
            up: vec![true; workers],
            excluded: HashMap::new(),
            fetches: false,
            policy: Policy::predicted_ttft(),
            now_ns: 0,
        }
    }

    pub(super) fn item(&mut self, prompt: Prompt) -> Item<usize> {
        self.prompts.push(prompt);
        let blocks = self.prompts.last().unwrap();
        let query = Query {
            leg: Leg::Prefill,
            prompt_tokens: blocks.len() as u64 * BLOCK,
            prompt_blocks: blocks.len() as u32,
            block_size: BLOCK as u32,
            turn: 0,
            draw: 0,
            sharing: Default::default(),
        };
        Item {
            key: self.prompts.len() - 1,
            arrival_ns: self.now_ns,
            class: 0,
            payer: Payer::EVERYONE,
            deadline_ns: None,
            query,
        }
    }

    /// A prompt of `blocks` blocks that no other prompt has.
    pub(super) fn cold(&mut self, blocks: u64) -> Item<usize> {
        let first = 1_000_000 * (self.prompts.len() as u64 + 1);
        self.item((first..first + blocks).collect())
    }

    pub(super) fn push(&mut self, queue: &mut Queue<usize>, item: Item<usize>) -> Ticket {
        queue.push(item, self.now_ns, self).unwrap()
    }

    /// Runs a round and returns the released keys with their workers.
    pub(super) fn round(&mut self, queue: &mut Queue<usize>) -> Vec<(usize, usize)> {
        let policy = self.policy.clone();
        let round = queue.round(self.now_ns, &policy, self);
        let begin = |release: Release<usize>| {
            let (key, worker) = (release.item.key, release.worker().place());
            let chosen = &release.candidates[release.choice.index];
            let query = &release.item.query;
            let cached = query.cached_tokens(chosen.held_blocks());
            let begin_ns = self.free_at_ns[worker].max(self.now_ns);
            self.free_at_ns[worker] =
                begin_ns + chosen.coefficients.prefill_ns(query.prompt_tokens, cached);
            self.held[worker].extend(&self.prompts[key]);
            (key, worker)
        };
        round.releases.into_iter().map(begin).collect()
    }

    fn excluded(&self, key: usize) -> &[usize] {
        self.excluded.get(&key).map_or(&[], Vec::as_slice)
    }

    /// What a round releases if each request is examined with its own candidates.
    pub(super) fn naive_round(&mut self, queue: &Queue<usize>) -> Vec<(usize, usize)> {
        let mut order = queue.next(self.now_ns);
        if let Some(oldest) = queue.oldest()
            && queue.credit_ms >= queue.waiting[oldest].prefill_ms
        {
            order.retain(|place| *place != oldest);
            order.insert(0, oldest);
        }
        order.extend(queue.beyond(&order));
        // The key, the worker and the prefill of each request before.
        let mut placed: Vec<(usize, usize, u64)> = Vec::new();
        let (mut held, mut released) = (HashSet::new(), Vec::new());
        for place in order {
            let Item { key, query, .. } = queue.waiting[place].item;
            let mut candidates = Vec::new();
            self.candidates(&key, &mut candidates);
            for candidate in &mut candidates {
                for (other, worker, prefill_ns) in &placed {
                    if *worker == candidate.worker.place() {
                        candidate.wait_ns += prefill_ns;
                        let shared = self.shared_blocks(&key, other);
                        candidate.speculative_blocks = candidate.speculative_blocks.max(shared);
                    }
                }
            }
            let mut choice = Choice::default();
            let waiting = queue.len() - released.len();
            if choice.decide(&Policy::predicted_ttft(), &candidates, &[], &query, waiting) {
                let begins = |candidate: &Candidate| {
                    candidate.up
                        && candidate.wait_ns == 0
                        && !held.contains(&candidate.worker.place())
                };
                let idle = CandidateIndex::all(candidates.len());
                let idle = idle.filter(|index| begins(&candidates[*index]));
                let price_ms = choice.price_of_waiting_ms(idle);
                let until_ns = queue.waiting[place].waits_until_ns;
                let until_ns = until_ns.or(price_ms.map(|ms| self.now_ns + (ms * 1e6) as u64));
                if !begins(&candidates[choice.index])
                    && price_ms.is_some()
                    && until_ns.is_some_and(|until_ns| until_ns <= self.now_ns)
                {
                    let idle = candidates.iter().map(|one| Candidate { up: begins(one), ..*one });
                    let idle: Vec<Candidate> = idle.collect();
                    choice.decide(&Policy::predicted_ttft(), &idle, &[], &query, waiting);
                }
                let chosen = &candidates[choice.index];
                let cached = query.cached_tokens(chosen.held_blocks());
                let prefill_ns = chosen.coefficients.prefill_ns(query.prompt_tokens, cached);
                let worker = chosen.worker.place();
                placed.push((key, worker, prefill_ns));
                if chosen.wait_ns == 0 && !held.contains(&worker) {
                    released.push((key, worker));
                } else {
                    held.insert(worker);
                }
            }
        }
        released
    }

    /// Lets time pass until a worker becomes free.
    pub(super) fn wait(&mut self) {
        let busy = self.free_at_ns.iter().filter(|free| **free > self.now_ns);
        self.now_ns = busy.min().copied().unwrap_or(self.now_ns);
    }

    /// Runs rounds until no request waits. Returns the keys in the order of their release, with
    /// workers.
    pub(super) fn run(&mut self, queue: &mut Queue<usize>) -> Vec<(usize, usize)> {
        let mut released = Vec::new();
        while !queue.is_empty() {
            released.extend(self.round(queue));
            self.wait();
        }
        released
    }
}

impl View<usize> for Fleet {
    fn candidates(&mut self, key: &usize, out: &mut Vec<Candidate>) {
        let prompt = &self.prompts[*key];
        let is_able = |worker: &usize| !self.excluded(*key).contains(worker);
        out.extend((0..self.free_at_ns.len()).filter(is_able).map(|worker| {
            let held = prompt.iter().take_while(|block| self.held[worker].contains(block));
            let overlap_blocks = held.count() as u32;
            Candidate {
                worker: WorkerIndex::at(worker),
                up: self.up[worker],
                wait_ns: self.free_at_ns[worker].saturating_sub(self.now_ns),
                overlap_blocks,
                speculative_blocks: overlap_blocks,
                can_fetch: self.fetches,
                ..Candidate::default()
            }
        }));
    }

    fn sources(&mut self, key: &usize, out: &mut Vec<Source>) {
        out.clear();
        let prompt = &self.prompts[*key];
        let held = self.held.iter().filter(|_| self.fetches).enumerate();
        out.extend(held.map(|(worker, held)| Source {
            worker: WorkerIndex::at(worker),
            rank: None,
            blocks: prompt.iter().take_while(|block| held.contains(block)).count() as u32,
            wait_ns: 0,
            kv_format: KvFormat::default(),
        }));
    }

    fn shared_blocks(&self, one: &usize, other: &usize) -> u32 {
        let pairs = self.prompts[*one].iter().zip(&self.prompts[*other]);
        pairs.take_while(|(a, b)| a == b).count() as u32
    }

    fn same_workers(&self, one: &usize, other: &usize) -> bool {
        self.excluded(*one) == self.excluded(*other)
    }
}
