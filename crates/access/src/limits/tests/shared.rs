//! How shares move between replicas, and what happens to those of replicas that are gone.

use splitrail_config::TenantLimits;

use super::cluster::{Cluster, START, TERMS, tenant, value};
use crate::limits::holdings::{FIRST_CONTACT_MS, Terms};
use crate::limits::plan::{CLOSED_MS, Purpose};
use crate::limits::window::DAY_MS;
use crate::limits::{LimitExceeded, LimitKind};

const REQUESTS: LimitKind = LimitKind::Requests;
const MINUTE: LimitKind = LimitKind::TokensPerMinute;
const DAY: LimitKind = LimitKind::TokensPerDay;

/// Three replicas with 60 requests and 6400 tokens in a minute, and 640,000 tokens in a day, which
/// have their first shares.
fn ready() -> Cluster {
    let mut cluster = Cluster::start(tenant(60, 6400, 640_000), &[0, 0, 0]);
    cluster.run(CLOSED_MS + 3000);
    cluster
}

/// Sends requests to a replica until one is refused; returns the number that was admitted.
fn flood(cluster: &mut Cluster, replica: usize, tokens: u64) -> u64 {
    let mut admitted = 0;
    while cluster.reserve(replica, tokens) {
        admitted += 1;
    }
    admitted
}

fn total(cluster: &Cluster, kind: LimitKind) -> u64 {
    cluster.store.as_ref().unwrap().total(kind)
}

#[test]
fn a_limit_is_divided_evenly_while_no_replica_needs_more() {
    let mut cluster = ready();
    assert_eq!(total(&cluster, REQUESTS), 60);
    for replica in 0..3 {
        assert_eq!(flood(&mut cluster, replica, 1), 20);
    }
}

#[test]
fn a_busy_replica_gets_what_the_others_do_not_need() {
    let mut cluster = ready();
    let mut admitted = 0;
    for _ in 0..10 {
        admitted += flood(&mut cluster, 0, 1);
        cluster.run(1000);
    }
    assert_eq!(admitted, 60, "one replica admits the whole limit");
    assert_eq!(flood(&mut cluster, 1, 1) + flood(&mut cluster, 2, 1), 0);
}

#[test]
fn a_request_as_large_as_the_limit_is_admitted_while_the_others_are_idle() {
    let mut cluster = ready();
    assert!(!cluster.reserve(2, 6400), "the replica has a third of the limit");
    cluster.run(3000);
    assert!(cluster.reserve(2, 6400));
}

#[test]
fn busy_replicas_together_admit_the_whole_limit_in_each_minute() {
    let mut cluster = ready();
    let mut last_minute = 0;
    for second in 0..300 {
        for replica in 0..3 {
            let admitted = flood(&mut cluster, replica, 1);
            last_minute += if second >= 240 { admitted } else { 0 };
        }
        cluster.run(1000);
    }
    assert!((57..=60).contains(&last_minute), "{last_minute} of 60");
}

#[test]
fn a_dead_replica_s_share_is_free_after_its_lease_and_a_window_but_for_the_floor() {
    let mut cluster = ready();
    cluster.replicas.truncate(2);
    let mut latest = 0;
    let wait_ms = TERMS.lease_ms + TERMS.window_ms + TERMS.margin_ms;
    for _ in 0..(wait_ms / 1000 - 10) {
        cluster.run(1000);
        latest = latest.max(flood(&mut cluster, 0, 1));
        let used = cluster.used(REQUESTS, 0, |_| true);
        assert!(used <= 40, "{used}");
    }
    cluster.run(40_000);
    cluster.admitted.clear();
    cluster.run(TERMS.window_ms + 1000);
    let mut admitted = 0;
    for _ in 0..5 {
        admitted += flood(&mut cluster, 0, 1);
        cluster.run(1000);
    }
    assert_eq!(admitted, 59, "all but the floor of the dead replica");
}

#[test]
fn replicas_that_die_again_and_again_take_at_most_a_quarter_of_the_limit() {
    let mut cluster = ready();
    for _ in 0..80 {
        cluster.run(5_000);
        cluster.restart(2);
    }
    cluster.run(2 * (TERMS.lease_ms + TERMS.window_ms + TERMS.margin_ms));
    for kind in [REQUESTS, MINUTE] {
        let limit = cluster.limit(kind);
        let record = cluster.store.as_ref().unwrap();
        let present = cluster.replicas.iter().map(|replica| &record.replicas[&replica.id]);
        let held: u64 = present.map(|entry| entry.holding(kind).unwrap().share).sum();
        assert!(held >= limit * 3 / 4, "{held} of {limit} ({kind:?})");
    }
    let admitted: u64 = (0..3).map(|replica| flood(&mut cluster, replica, 1)).sum();
    assert!(admitted >= 45, "{admitted} of 60");
}

#[test]
fn dead_replicas_without_shares_leave_the_record() {
    let only_minute = TenantLimits { tokens_per_day: None, ..tenant(60, 6400, 1) };
    let mut cluster = Cluster::start(only_minute, &[0, 0]);
    for _ in 0..400 {
        cluster.run(3_000);
        cluster.restart(1);
    }
    cluster.run(2 * (TERMS.lease_ms + TERMS.window_ms + TERMS.margin_ms));
    let entries = cluster.store.as_ref().unwrap().replicas.len();
    assert!(entries <= 2 + 64, "{entries}");
    assert!(flood(&mut cluster, 1, 1) > 0, "the record has room for the newest one");
}

#[test]
fn a_dead_replica_s_entry_is_removed_after_a_day() {
    let mut cluster = ready();
    cluster.replicas.truncate(2);
    cluster.run(200_000);
    assert_eq!(cluster.store.as_ref().unwrap().replicas.len(), 3);
    for _ in 0..DAY_MS / 5_000 + 100 {
        cluster.now_ms += 5_000;
        cluster.pass();
    }
    assert_eq!(cluster.store.as_ref().unwrap().replicas.len(), 2);
    assert_eq!(total(&cluster, REQUESTS), 60);
}

#[test]
fn the_share_of_a_dead_replica_stays_used_until_midnight() {
    let mut cluster = ready();
    assert_eq!(flood(&mut cluster, 2, 2000), 1);
    cluster.run(3000);
    cluster.replicas.truncate(2);
    cluster.run(200_000);
    let dead = cluster.store.as_ref().unwrap().replicas["r3"].holding(DAY).unwrap().share;
    assert!((2000..=2000 + 640_000 / 16).contains(&dead), "{dead}");
    cluster.run(300_000);
    let dead = cluster.store.as_ref().unwrap().replicas["r3"].holding(DAY).unwrap().share;
    assert!(dead <= 640_000 / 32, "{dead} on the next day");
}

#[test]
fn a_replica_that_leaves_gives_back_what_it_has_not_used() {
    let mut cluster = ready();
    assert!(cluster.reserve(2, 100));
    cluster.read(2, Purpose::Leave);
    cluster.arrive(2, true);
    assert_eq!(cluster.store.as_ref().unwrap().replicas["r3"].holding(REQUESTS).unwrap().share, 1);
    assert!(!cluster.reserve(2, 1), "nothing is admitted any more");
    cluster.replicas.truncate(2);
    let mut admitted = 1;
    for _ in 0..5 {
        admitted += flood(&mut cluster, 0, 1);
        cluster.run(1000);
    }
    assert_eq!(admitted, 60);
    cluster.run(2 * TERMS.window_ms);
    let left = &cluster.store.as_ref().unwrap().replicas["r3"];
    assert_eq!(left.holding(REQUESTS).unwrap().share, 0);
    assert_eq!(left.holding(DAY).unwrap().share, 100, "the day is not over");
    cluster.run(400_000);
    assert!(!cluster.store.as_ref().unwrap().replicas.contains_key("r3"));
}

#[test]
fn without_the_broker_a_replica_uses_its_share_until_the_lease_ends_and_then_the_floor() {
    let mut cluster = ready();
    cluster.replicas.iter_mut().for_each(|replica| replica.is_cut = true);
    assert_eq!(flood(&mut cluster, 0, 1), 20);
    cluster.run(TERMS.lease_ms + TERMS.window_ms + 1000);
    assert_eq!(flood(&mut cluster, 0, 1), 1, "a 32nd of 60");
    assert_eq!(flood(&mut cluster, 1, 1), 1, "the share was not used up, but its lease has ended");
    cluster.replicas.iter_mut().for_each(|replica| replica.is_cut = false);
    cluster.run(3000);
    assert_eq!(
        flood(&mut cluster, 1, 1) + flood(&mut cluster, 0, 1) + flood(&mut cluster, 2, 1),
        58
    );
}

#[test]
fn a_replica_that_never_reached_the_broker_uses_the_floor_after_a_moment() {
    let mut cluster = Cluster::start(tenant(60, 6400, 640_000), &[0]);
    cluster.replicas[0].is_cut = true;
    assert!(!cluster.reserve(0, 1));
    cluster.run(FIRST_CONTACT_MS);
    assert_eq!(flood(&mut cluster, 0, 1), 1);
    cluster.replicas[0].is_cut = false;
    cluster.run(CLOSED_MS + 2000);
    assert_eq!(flood(&mut cluster, 0, 1), 59, "what the floor allowed is used");
}

#[test]
fn a_lost_record_is_written_again_from_what_the_replicas_hold() {
    let mut cluster = ready();
    assert!(cluster.reserve(0, 2000));
    cluster.lose_store();
    cluster.run(10_000);
    for kind in LimitKind::ALL {
        let limit = value(&tenant(60, 6400, 640_000), kind);
        assert!(total(&cluster, kind) <= limit, "{kind:?}");
    }
    for replica in 0..3 {
        flood(&mut cluster, replica, 100);
    }
    assert!(cluster.used(MINUTE, 0, |_| true) <= 6400);
    cluster.run(2 * (TERMS.lease_ms + TERMS.window_ms));
    assert_eq!(total(&cluster, REQUESTS), 60, "and then all of the limit is shared again");
}

#[test]
fn the_lowest_limit_applies_while_replicas_have_different_ones() {
    let mut cluster = ready();
    cluster.change(0, tenant(30, 6400, 640_000));
    cluster.run(3000);
    assert_eq!(total(&cluster, REQUESTS), 30);
    for replica in 1..3 {
        cluster.change(replica, tenant(90, 6400, 640_000));
    }
    cluster.run(3000);
    assert_eq!(total(&cluster, REQUESTS), 30);
    cluster.change(0, tenant(90, 6400, 640_000));
    cluster.run(3000);
    assert_eq!(total(&cluster, REQUESTS), 90);
}

#[test]
fn after_a_limit_was_lowered_a_minute_has_no_more_than_the_lower_limit() {
    let mut cluster = ready();
    for replica in 0..3 {
        assert_eq!(flood(&mut cluster, replica, 1), 20);
    }
    cluster.run(55_000);
    (0..3).for_each(|replica| cluster.change(replica, tenant(15, 6400, 640_000)));
    cluster.run(3000);
    cluster.admitted.clear();
    // All that was used under the higher limit ends at once, before any replica writes the record.
    cluster.now_ms += 3000;
    let mut used = 0;
    for _ in 0..100 {
        for replica in 0..3 {
            flood(&mut cluster, replica, 1);
        }
        used = cluster.used(REQUESTS, 0, |_| true);
        assert!(used <= 15, "{used} of 15");
        cluster.run(1000);
    }
    assert!(used >= 13, "{used} of 15");
}

#[test]
fn a_request_without_a_share_gets_a_short_retry_after() {
    let mut cluster = ready();
    flood(&mut cluster, 0, 1);
    let time = cluster.time(0);
    let refused = cluster.replicas[0].limits.reserve(time, 1).unwrap_err();
    assert_eq!(refused, LimitExceeded::Used { limit: REQUESTS, retry_after_ms: 1000 });
    let standing = cluster.replicas[0].limits.standing(time).requests.unwrap();
    assert_eq!((standing.limit, standing.remaining), (60, 40));
}

#[test]
fn a_replica_without_a_share_gets_the_floor_from_the_others_while_it_is_cut_off() {
    let mut cluster = ready();
    let busy = |cluster: &mut Cluster, seconds: u64| {
        for _ in 0..seconds {
            flood(cluster, 0, 1);
            cluster.run(1000);
        }
    };
    busy(&mut cluster, 70);
    assert_eq!(flood(&mut cluster, 2, 1), 0, "the busy replica has the whole limit");
    cluster.replicas[2].is_cut = true;
    let Terms { lease_ms, window_ms, margin_ms } = TERMS;
    busy(&mut cluster, (lease_ms + window_ms) / 1000);
    assert_eq!(flood(&mut cluster, 2, 1), 0, "the others do not know yet");
    busy(&mut cluster, (4 * lease_ms + window_ms + 2 * margin_ms) / 1000);
    // A new replica, which has not seen how long the other one has been silent, takes what is free.
    cluster.restart(1);
    for _ in 0..5 {
        cluster.run(1000);
        flood(&mut cluster, 0, 1);
        flood(&mut cluster, 1, 1);
    }
    assert_eq!(flood(&mut cluster, 2, 1), 1, "requests are still admitted");
    assert!(cluster.used(REQUESTS, 0, |_| true) <= 60);
    busy(&mut cluster, 120);
    let used = cluster.used(REQUESTS, 0, |one| one.replica == "r1");
    assert!((57..=59).contains(&used), "{used}");
}

#[test]
fn without_the_broker_the_share_of_a_day_is_used_until_the_day_ends() {
    let mut cluster = ready();
    let held = cluster.store.as_ref().unwrap().replicas["r1"].holding(DAY).unwrap().share;
    cluster.replicas[0].is_cut = true;
    cluster.run(TERMS.lease_ms + TERMS.window_ms + 1000);
    // Within the floor of a minute, and more than the floor of a day would be.
    let floor = 200;
    let mut used = 0;
    while cluster.now_ms < START + 300_000 - 61_000 {
        used += floor * flood(&mut cluster, 0, floor).min(1);
        cluster.now_ms += 61_000;
    }
    assert!(used >= 3 * floor && used <= held, "{used} of {held}");
}
