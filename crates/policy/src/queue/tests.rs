//! Tests of when requests are released, and that every request is released.

mod fleet;
mod properties;

use super::*;
use crate::policy::Policy;
use fleet::{BLOCK, Fleet, MS};

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
