//! What holds for random requests and workers.

use std::collections::HashMap;

use super::*;
use proptest::prelude::*;

/// The prefill time of a cold prompt in milliseconds.
fn length_ms(blocks: u64) -> f64 {
    crate::Coefficients::default().prefill_seconds(blocks * BLOCK, 0) * 1e3
}

fn of_tenant(tenant: u64) -> Payer {
    Payer { tenant, ..Payer::EVERYONE }
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
            let item = Item { class: *class, payer: of_tenant(*tenant), ..fleet.cold(*blocks) };
            fleet.push(&mut queue, item);
            fleet.now_ns += 1;
        }
        let older_ms: f64 = old.iter().map(|(blocks, ..)| length_ms(*blocks)).sum();
        let bound_ms = older_ms / share + (old.len() + 1) as f64 * length_ms(8);
        let mut others_ms = 0.0;
        for (blocks, class, tenant) in &young {
            // There are always two newer requests that could be released instead.
            while queue.len() < old.len() + 2 {
                let item = Item { class: *class, payer: of_tenant(*tenant), ..fleet.cold(*blocks) };
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

    /// While two tenants wait, or two sessions of one tenant, neither gets more
    /// than its share by more than the allowed lead, one prompt, and the share of the oldest request.
    #[test]
    fn tenants_and_sessions_get_their_shares(
        are_sessions: bool,
        weight in 0.25f64..4.0,
        lengths in proptest::collection::vec((1u64..10, 10u64..60), 150),
    ) {
        let mut fleet = Fleet::new(1);
        let share = 0.01;
        let settings = QueueConfig { fairness_ms: 5_000.0, oldest_share: share, ..config() };
        let mut queue = Queue::new(settings);
        let weight = if are_sessions { 1.0 } else { weight };
        let payers = match are_sessions {
            true => [1, 2].map(|session| Payer { session, ..Payer::EVERYONE }),
            false => [Payer { tenant_weight: weight, ..of_tenant(1) }, of_tenant(2)],
        };
        for (short, long) in &lengths {
            let one = Item { payer: payers[0], ..fleet.cold(*short) };
            fleet.push(&mut queue, one);
            let two = Item { payer: payers[1], ..fleet.cold(*long) };
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

    /// If workers hang, even if they still count as up, no request waits for one for longer than its
    /// decision said that it is worth, while another worker is idle that may serve it.
    #[test]
    fn no_request_waits_for_a_hung_worker_while_another_is_idle(
        workers in 2usize..5,
        hangs in proptest::collection::vec((0usize..5, 0u64..3_000), 1..4),
        prompts in proptest::collection::vec((0u64..3, 1u64..12, 0u64..200), 40..120),
    ) {
        // Without a price of extra work, no wait is worth more than what the request itself can lose.
        let policy = Policy::PredictedTtft { extra_work_weight: Some(0.0), temperature: 0.0 };
        let mut fleet = Fleet { policy, ..Fleet::new(workers) };
        let mut queue = Queue::new(QueueConfig { window: 8, ..config() });
        // Worker 0 never hangs. A hung worker seems to be about to become free.
        let hangs_at = |worker: usize| {
            let of_worker = hangs.iter().filter(|(hung, _)| *hung % workers == worker);
            of_worker.map(|(_, at_ms)| at_ms * MS).min().filter(|_| worker > 0)
        };
        let mut arrivals = Vec::new();
        let mut at_ns = 0;
        for (prefix, blocks, gap_ms) in &prompts {
            at_ns += gap_ms * MS;
            arrivals.push((at_ns, *prefix, *blocks));
        }
        arrivals.reverse();
        let mut idle_since_ns: HashMap<usize, u64> = HashMap::new();
        while !(arrivals.is_empty() && queue.is_empty()) {
            fleet.now_ns += 10 * MS;
            while arrivals.last().is_some_and(|(at_ns, ..)| *at_ns <= fleet.now_ns) {
                let (_, prefix, blocks) = arrivals.pop().unwrap();
                let shared = prefix * 100..prefix * 100 + 5;
                let own = 1_000 * (fleet.prompts.len() as u64 + 1);
                let item = fleet.item(shared.chain(own..own + blocks).collect());
                fleet.push(&mut queue, item);
            }
            for worker in 0..workers {
                if hangs_at(worker).is_some_and(|at_ns| at_ns <= fleet.now_ns) {
                    fleet.free_at_ns[worker] = fleet.now_ns + 30 * MS;
                }
            }
            fleet.round(&mut queue);
            let is_idle = fleet.free_at_ns.iter().any(|at_ns| *at_ns <= fleet.now_ns);
            let waiting: Vec<usize> = queue.iter().map(|item| item.key).collect();
            idle_since_ns.retain(|key, _| is_idle && waiting.contains(key));
            for key in waiting.into_iter().filter(|_| is_idle) {
                let since_ns = *idle_since_ns.entry(key).or_insert(fleet.now_ns);
                // What a request can lose by an idle worker is at most its own prefill.
                let worth_ms = length_ms(fleet.prompts[key].len() as u64) + 30.0;
                let waited_ms = (fleet.now_ns - since_ns) as f64 / 1e6;
                // A request outside the window is examined once in this many rounds.
                let turns_ms = 10.0 * (queue.len() as f64 / 8.0 + 2.0);
                prop_assert!(waited_ms <= worth_ms + turns_ms, "{key}: {waited_ms} {worth_ms}");
            }
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
