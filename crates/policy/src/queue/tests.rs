//! Tests of when requests are released, and that every request is released.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::candidate::Leg;
use crate::kv_format::KvFormat;
use crate::policy::Policy;
use proptest::prelude::*;

const BLOCK: u64 = 512;
const MS: u64 = 1_000_000;

/// A prompt as the names of its blocks. The key of a request is its position in `Fleet::prompts`.
type Prompt = Vec<u64>;

/// Workers that compute one prompt after the other and keep all of their blocks.
struct Fleet {
    prompts: Vec<Prompt>,
    free_at_ns: Vec<u64>,
    held: Vec<HashSet<u64>>,
    up: Vec<bool>,
    /// The workers that must not serve a request, by its key; none without an entry.
    excluded: HashMap<usize, Vec<usize>>,
    /// Whether workers fetch prefixes from each other.
    fetches: bool,
    now_ns: u64,
}

impl Fleet {
    fn new(workers: usize) -> Self {
        Self {
            prompts: Vec::new(),
            free_at_ns: vec![0; workers],
            held: vec![HashSet::new(); workers],
            up: vec![true; workers],
            excluded: HashMap::new(),
            fetches: false,
            now_ns: 0,
        }
    }

    fn item(&mut self, prompt: Prompt) -> Item<usize> {
        self.prompts.push(prompt);
        let blocks = self.prompts.last().unwrap();
        let query = Query {
            leg: Leg::Prefill,
            prompt_tokens: blocks.len() as u64 * BLOCK,
            prompt_blocks: blocks.len() as u32,
            first_blocks: [0; 2],
            block_size: BLOCK as u32,
            turn: 0,
            draw: 0,
        };
        Item {
            key: self.prompts.len() - 1,
            arrival_ns: self.now_ns,
            class: 0,
            tenant: 0,
            tenant_weight: 1.0,
            deadline_ns: None,
            query,
        }
    }

    /// A prompt of `blocks` blocks that no other prompt has.
    fn cold(&mut self, blocks: u64) -> Item<usize> {
        let first = 1_000_000 * (self.prompts.len() as u64 + 1);
        self.item((first..first + blocks).collect())
    }

    fn push(&mut self, queue: &mut Queue<usize>, item: Item<usize>) -> Ticket {
        queue.push(item, self.now_ns, self).unwrap()
    }

    /// Runs a round and returns the released keys with their workers.
    fn round(&mut self, queue: &mut Queue<usize>) -> Vec<(usize, usize)> {
        let round = queue.round(self.now_ns, &Policy::predicted_ttft(), self);
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
    fn naive_round(&mut self, queue: &Queue<usize>) -> Vec<(usize, usize)> {
        let mut order = queue.next(self.now_ns);
        if let Some(oldest) = queue.oldest()
            && queue.credit_ms >= queue.waiting[oldest].prefill_ms
        {
            order.retain(|place| *place != oldest);
            order.insert(0, oldest);
        }
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
    fn wait(&mut self) {
        let busy = self.free_at_ns.iter().filter(|free| **free > self.now_ns);
        self.now_ns = busy.min().copied().unwrap_or(self.now_ns);
    }

    /// Runs rounds until no request waits. Returns the keys in the order of their release, with
    /// workers.
    fn run(&mut self, queue: &mut Queue<usize>) -> Vec<(usize, usize)> {
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

fn config() -> QueueConfig {
    QueueConfig { lead_ms: 0.0, ..QueueConfig::default() }
}

fn keys(released: &[(usize, usize)]) -> Vec<usize> {
    released.iter().map(|(key, _)| *key).collect()
}

#[test]
fn the_shortest_prefill_goes_first_or_else_the_first_that_came() {
    for (order, expected) in [(Order::ShortestFirst, [2, 1, 0]), (Order::Arrival, [0, 1, 2])] {
        let mut fleet = Fleet::new(1);
        let mut queue = Queue::new(QueueConfig { order, ..config() });
        for blocks in [30, 20, 10] {
            let item = fleet.cold(blocks);
            fleet.push(&mut queue, item);
            fleet.now_ns += 1;
        }
        assert_eq!(keys(&fleet.run(&mut queue)), expected);
    }
}

#[test]
fn a_long_prompt_with_cached_blocks_counts_as_short() {
    let mut fleet = Fleet::new(1);
    let mut queue = Queue::new(config());
    fleet.held[0].extend(0..50);
    let long = fleet.item((0..52).collect());
    fleet.push(&mut queue, long);
    let short = fleet.cold(5);
    fleet.push(&mut queue, short);
    assert_eq!(keys(&fleet.run(&mut queue)), [0, 1]);
}

#[test]
fn a_request_that_fetches_is_released_while_its_worker_still_computes() {
    let mut fleet = Fleet { fetches: true, ..Fleet::new(2) };
    let mut queue = Queue::new(config());
    fleet.held[0].extend(0..40);
    fleet.free_at_ns = vec![10_000 * MS, 600 * MS];
    let item = fleet.item((0..41).collect());
    fleet.push(&mut queue, item);
    let policy = Policy::predicted_ttft();
    let first = queue.round(0, &policy, &mut fleet);
    // The fetch of 20,480 tokens takes 30 ms and 67.1 ms.
    let due_ms = first.due_ns.unwrap() / MS;
    assert_eq!((first.releases.len(), due_ms), (0, 502));
    fleet.now_ns = first.due_ns.unwrap();
    let second = queue.round(fleet.now_ns, &policy, &mut fleet);
    assert_eq!(second.releases[0].worker(), WorkerIndex(1));
    assert_eq!(second.releases[0].choice.fetch().map(|fetch| fetch.blocks), Some(40));
}

#[test]
fn fetches_of_one_round_wait_for_each_other_at_their_source() {
    let mut fleet = Fleet { fetches: true, ..Fleet::new(3) };
    let mut queue = Queue::new(config());
    fleet.held[0].extend(0..80);
    fleet.free_at_ns[0] = 10_000 * MS;
    for (first, last) in [(0, 100), (40, 101)] {
        let item = fleet.item((first..first + 40).chain([last]).collect());
        fleet.push(&mut queue, item);
    }
    let round = queue.round(0, &Policy::predicted_ttft(), &mut fleet);
    let ready = round.releases.iter().map(|release| release.choice.fetch().unwrap().ready_ms);
    let ready: Vec<u64> = ready.map(|ms| ms.round() as u64).collect();
    assert_eq!(ready, [97, 164]);
}

#[test]
fn a_request_waits_for_its_prefix_unless_that_takes_longer_than_to_compute_it() {
    let waits = |busy_ms: u64| {
        let mut fleet = Fleet::new(2);
        let mut queue = Queue::new(config());
        fleet.held[0].extend(0..20);
        fleet.free_at_ns[0] = busy_ms * MS;
        let item = fleet.item((0..21).collect());
        fleet.push(&mut queue, item);
        fleet.round(&mut queue).is_empty()
    };
    // 20 blocks take 1.0 s; on an idle fleet, the work lost counts once more.
    assert!(waits(1_000));
    assert!(!waits(3_000));
}

#[test]
fn a_popular_prefix_does_not_leave_workers_idle() {
    let mut fleet = Fleet::new(4);
    let mut queue = Queue::new(config());
    fleet.held[0].extend(0..8);
    for i in 0..40 {
        let own = 1_000 * (i + 1);
        let item = fleet.item((0..8).chain(own..own + 8).collect());
        fleet.push(&mut queue, item);
    }
    let released = fleet.run(&mut queue);
    let on = |worker| released.iter().filter(|(_, w)| *w == worker).count();
    assert_eq!(released.len(), 40);
    for worker in 0..4 {
        assert!((6..=16).contains(&on(worker)), "{worker}: {}", on(worker));
    }
}

#[test]
fn siblings_follow_the_first_of_them() {
    let mut fleet = Fleet::new(4);
    let mut queue = Queue::new(config());
    for _ in 0..3 {
        let item = fleet.item((0..20).collect());
        fleet.push(&mut queue, item);
    }
    let first = fleet.round(&mut queue);
    assert_eq!(first.len(), 1, "the others will find there what it computes");
    fleet.wait();
    let rest = fleet.run(&mut queue);
    assert!(rest.iter().all(|(_, worker)| *worker == first[0].1), "{rest:?}");
}

#[test]
fn classes_deadlines_and_the_longest_wait_come_before_length() {
    let mut fleet = Fleet::new(1);
    let mut queue = Queue::new(config());
    let short = fleet.cold(2);
    let urgent = Item { deadline_ns: Some(700 * MS), ..fleet.cold(10) };
    let too_late = Item { deadline_ns: Some(400 * MS), ..fleet.cold(10) };
    let later = Item { deadline_ns: Some(60_000 * MS), ..fleet.cold(11) };
    let high = Item { class: 1, ..fleet.cold(20) };
    for item in [short, urgent, too_late, later, high] {
        fleet.push(&mut queue, item);
    }
    let next: Vec<usize> = queue.next(0).into_iter().map(|i| queue.waiting[i].item.key).collect();
    assert_eq!(next, [4, 1, 0, 2, 3]);
}

#[test]
fn a_full_queue_and_an_unreachable_goal_refuse_and_say_when_to_come_again() {
    let mut fleet = Fleet::new(2);
    let mut queue = Queue::new(QueueConfig { max_waiting: 2, ..config() });
    fleet.free_at_ns = vec![4_000 * MS; 2];
    for _ in 0..2 {
        let item = fleet.cold(20);
        fleet.push(&mut queue, item);
    }
    let item = fleet.cold(20);
    let refused = queue.push(item, 0, &mut fleet).unwrap_err();
    assert_eq!(refused.predicted_ttft_ms, None);
    // Four seconds, and two prompts of one second on two workers.
    assert_eq!(refused.retry_after_seconds(), 6);

    let mut queue = Queue::new(QueueConfig { ttft_goal_ms: Some(4_500.0), ..config() });
    let item = fleet.cold(20);
    let refused = queue.push(item, 0, &mut fleet).unwrap_err();
    assert!(refused.predicted_ttft_ms.is_some_and(|ms| (5_000.0..5_100.0).contains(&ms)));
    assert_eq!(refused.retry_after_seconds(), 1);
    let item = fleet.cold(5);
    assert!(queue.push(item, 0, &mut fleet).is_ok(), "a shorter one can make it");
    // Too long for the goal anywhere and at any time: waiting would not help.
    fleet.free_at_ns = vec![0; 2];
    let item = fleet.cold(200);
    assert!(queue.push(item, 0, &mut fleet).is_ok());
}

#[test]
fn a_round_says_when_the_next_is_due_and_a_worker_gets_its_next_a_little_before() {
    let mut fleet = Fleet::new(1);
    let mut queue = Queue::new(QueueConfig { lead_ms: 10.0, ..config() });
    fleet.free_at_ns[0] = 50 * MS;
    let item = fleet.cold(2);
    fleet.push(&mut queue, item);
    let round = queue.round(0, &Policy::predicted_ttft(), &mut fleet);
    assert!(round.releases.is_empty());
    assert_eq!(round.due_ns, Some(40 * MS));
    fleet.now_ns = 40 * MS;
    assert_eq!(fleet.round(&mut queue).len(), 1);
}

#[test]
fn requests_that_leave_are_forgotten_and_dead_workers_are_a_last_resort() {
    let mut fleet = Fleet::new(2);
    let mut queue = Queue::new(config());
    fleet.up[0] = false;
    let item = fleet.cold(3);
    fleet.push(&mut queue, item);
    assert_eq!(fleet.round(&mut queue), [(0, 1)]);
    let item = fleet.cold(3);
    let gone = fleet.push(&mut queue, item);
    assert_eq!(queue.remove(gone).unwrap().key, 1);
    assert!(queue.remove(gone).is_none() && queue.is_empty());
    fleet.up[1] = false;
    let item = fleet.cold(3);
    fleet.push(&mut queue, item);
    assert_eq!(fleet.round(&mut queue).len(), 1, "its attempt says what is wrong");
}

#[test]
fn a_request_that_may_not_go_to_a_free_worker_does_not_keep_others_from_it() {
    let mut fleet = Fleet::new(2);
    let mut queue = Queue::new(config());
    fleet.free_at_ns[0] = 1_000 * MS;
    let retried = fleet.cold(2);
    fleet.excluded.insert(retried.key, vec![1]);
    fleet.push(&mut queue, retried);
    let other = fleet.cold(20);
    fleet.push(&mut queue, other);
    assert_eq!(fleet.round(&mut queue), [(1, 1)]);
    assert_eq!(fleet.run(&mut queue), [(0, 0)]);
}

#[test]
fn a_request_without_any_worker_left_does_not_keep_others_from_theirs() {
    let mut fleet = Fleet::new(1);
    let mut queue = Queue::new(config());
    let retried = fleet.cold(2);
    fleet.excluded.insert(retried.key, vec![0]);
    fleet.push(&mut queue, retried);
    let other = fleet.cold(20);
    fleet.push(&mut queue, other);
    assert_eq!(fleet.round(&mut queue), [(1, 0)]);
}

/// The prefill time of a cold prompt in milliseconds.
fn length_ms(blocks: u64) -> f64 {
    crate::Coefficients::default().prefill_seconds(blocks * BLOCK, 0) * 1e3
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Regardless of the number and length of later requests, a request is released when the work
    /// of older requests, divided by their share, has been done.
    #[test]
    fn no_request_starves(
        share in 0.05f64..0.5,
        old in proptest::collection::vec((1u64..60, 0i32..3, 0u64..3), 1..8),
        young in proptest::collection::vec((1u64..8, 0i32..3, 0u64..3), 600),
    ) {
        let mut fleet = Fleet::new(1);
        let mut queue = Queue::new(QueueConfig { oldest_share: share, ..config() });
        for (blocks, class, tenant) in &old {
            let item = Item { class: *class, tenant: *tenant, ..fleet.cold(*blocks) };
            fleet.push(&mut queue, item);
            fleet.now_ns += 1;
        }
        let older_ms: f64 = old.iter().map(|(blocks, ..)| length_ms(*blocks)).sum();
        let bound_ms = older_ms / share + (old.len() + 1) as f64 * length_ms(8);
        let mut others_ms = 0.0;
        for (blocks, class, tenant) in &young {
            // There are always two newer requests that could be released instead.
            while queue.len() < old.len() + 2 {
                let item = Item { class: *class, tenant: *tenant, ..fleet.cold(*blocks) };
                fleet.push(&mut queue, item);
            }
            fleet.wait();
            for (key, _) in fleet.round(&mut queue) {
                if key >= old.len() {
                    others_ms += length_ms(fleet.prompts[key].len() as u64);
                }
            }
            if others_ms > bound_ms {
                let left = queue.iter().filter(|item| item.key < old.len()).count();
                prop_assert_eq!(left, 0, "{} ms released before", others_ms);
                break;
            }
        }
    }

    /// While two tenants wait, neither gets more than its share by more than the allowed lead, one
    /// prompt, and the share of the oldest request.
    #[test]
    fn tenants_get_their_shares(
        weight in 0.25f64..4.0,
        lengths in proptest::collection::vec((1u64..10, 10u64..60), 150),
    ) {
        let mut fleet = Fleet::new(1);
        let share = 0.01;
        let settings = QueueConfig { fairness_ms: 5_000.0, oldest_share: share, ..config() };
        let mut queue = Queue::new(settings);
        for (short, long) in &lengths {
            let one = Item { tenant: 1, tenant_weight: weight, ..fleet.cold(*short) };
            fleet.push(&mut queue, one);
            let two = Item { tenant: 2, ..fleet.cold(*long) };
            fleet.push(&mut queue, two);
        }
        let mut got = [0.0; 2];
        let mut waiting = [lengths.len(); 2];
        while waiting.iter().all(|count| *count > 0) {
            for (key, _) in fleet.round(&mut queue) {
                let blocks = fleet.prompts[key].len() as u64;
                let per_weight = if key % 2 == 0 { weight } else { 1.0 };
                got[key % 2] += length_ms(blocks) / per_weight;
                waiting[key % 2] -= 1;
            }
            fleet.wait();
            let total = got[0] * weight + got[1];
            let allowed = 5_000.0 + length_ms(60) + length_ms(10) / weight
                + share * total * (1.0 + 1.0 / weight);
            prop_assert!((got[0] - got[1]).abs() <= allowed, "{got:?} {allowed}");
        }
    }

    /// Whatever workers a request has excluded, rounds that end early release what rounds would that
    /// examine every request.
    #[test]
    fn a_round_releases_what_the_candidates_of_each_request_allow(
        workers in 1usize..5,
        prompts in proptest::collection::vec(
            (0u64..4, 1u64..30, proptest::collection::vec(0usize..8, 0..3)),
            1..40,
        ),
    ) {
        let mut fleet = Fleet::new(workers);
        let mut queue = Queue::new(QueueConfig { window: 8, ..config() });
        for (prefix, blocks, excluded) in &prompts {
            let shared = prefix * 100..prefix * 100 + 5;
            let own = 1_000 * (fleet.prompts.len() as u64 + 1);
            let item = fleet.item(shared.chain(own..own + blocks).collect());
            fleet.excluded.insert(item.key, excluded.clone());
            fleet.push(&mut queue, item);
            let naive = fleet.naive_round(&queue);
            prop_assert_eq!(fleet.round(&mut queue), naive);
            fleet.now_ns += 100 * MS;
        }
        for _ in &prompts {
            fleet.wait();
            let naive = fleet.naive_round(&queue);
            prop_assert_eq!(fleet.round(&mut queue), naive);
        }
    }

    /// Each request is released exactly once, and no worker is given two at a time.
    #[test]
    fn all_are_released_once_and_workers_are_never_piled_up(
        workers in 1usize..5,
        prompts in proptest::collection::vec((0u64..4, 1u64..30, 0i32..2), 1..60),
    ) {
        let mut fleet = Fleet::new(workers);
        let mut queue = Queue::new(QueueConfig { window: 8, ..config() });
        let mut released = Vec::new();
        for (prefix, blocks, class) in &prompts {
            let shared = prefix * 100..prefix * 100 + 5;
            let own = 1_000 * (fleet.prompts.len() as u64 + 1);
            let item = fleet.item(shared.chain(own..own + blocks).collect());
            fleet.push(&mut queue, Item { class: *class, ..item });
            released.extend(fleet.round(&mut queue));
            fleet.now_ns += 100 * MS;
        }
        while !queue.is_empty() {
            let free = fleet.free_at_ns.iter().filter(|at| **at <= fleet.now_ns).count();
            let now = fleet.round(&mut queue);
            prop_assert!(now.len() <= free, "{now:?} on {free}");
            released.extend(now);
            fleet.wait();
        }
        let mut keys = keys(&released);
        keys.sort_unstable();
        prop_assert_eq!(keys, (0..prompts.len()).collect::<Vec<_>>());
    }
}
