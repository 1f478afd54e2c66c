//! Single cases in which replicas could admit more than the limit.

use super::cluster::{Cluster, START, TERMS, tenant};
use crate::limits::LimitKind;
use crate::limits::plan::{CLOSED_MS, Purpose};

const REQUESTS: LimitKind = LimitKind::Requests;
const DAY: LimitKind = LimitKind::TokensPerDay;
const MIDNIGHT: u64 = START + 300_000;

/// Two replicas with 60 requests in a minute and 6000 tokens in a day, and these differences of
/// their clocks.
fn ready(skews_ms: [i64; 2]) -> Cluster {
    let mut cluster = Cluster::start(tenant(60, 1_000_000, 6000), &skews_ms);
    cluster.run(CLOSED_MS + 3000);
    cluster
}

fn flood(cluster: &mut Cluster, replica: usize, tokens: u64) {
    while cluster.reserve(replica, tokens) {}
}

#[test]
fn a_share_is_given_up_before_the_record_says_so() {
    let mut cluster = ready([0, 0]);
    flood(&mut cluster, 1, 1);
    cluster.now_ms += 1000;
    cluster.read(1, Purpose::Hold);
    cluster.arrive(1, true);
    // The first replica writes that it needs less, and the acknowledgement is lost.
    cluster.read(0, Purpose::Hold);
    cluster.arrive(0, false);
    cluster.read(1, Purpose::Hold);
    cluster.arrive(1, true);
    flood(&mut cluster, 1, 1);
    flood(&mut cluster, 0, 1);
    assert_eq!(cluster.used(REQUESTS, 0, |_| true), 60);
}

#[test]
fn a_share_is_not_used_before_the_record_has_it() {
    let mut cluster = ready([0, 0]);
    flood(&mut cluster, 1, 1);
    cluster.run(1000);
    cluster.now_ms += 1000;
    cluster.read(0, Purpose::Hold);
    cluster.arrive(0, true);
    cluster.read(1, Purpose::Hold);
    let before = cluster.used(REQUESTS, 0, |_| true);
    flood(&mut cluster, 1, 1);
    assert_eq!(cluster.used(REQUESTS, 0, |_| true), before);
    // The write never arrives, and the first replica takes its share back.
    cluster.lose_write(1);
    flood(&mut cluster, 0, 1);
    cluster.run(3000);
    flood(&mut cluster, 0, 1);
    assert!(cluster.used(REQUESTS, 0, |_| true) <= 60);
}

#[test]
fn a_days_use_is_not_returned_while_a_clock_may_be_slow() {
    let mut cluster = ready([2000, -2000]);
    while cluster.used(DAY, 0, |_| true) < 5900 {
        cluster.reserve(0, 100);
        cluster.run(1000);
    }
    // The first replica is in the next day, and the second one is not.
    cluster.now_ms = MIDNIGHT - 1900;
    let used = |cluster: &Cluster| cluster.used(DAY, 1, |_| true);
    for _ in 0..30 {
        cluster.pass();
        cluster.now_ms += 100;
        flood(&mut cluster, 1, 100);
        assert!(used(&cluster) <= 6000, "{}", used(&cluster));
    }
}

#[test]
fn the_day_of_a_dead_replica_does_not_end_while_a_clock_may_be_slow() {
    let mut cluster = ready([-2000, 2000]);
    // Used up by the dead replica, so that its share is more than the floor.
    while cluster.used(DAY, 0, |_| true) < 3000 {
        cluster.reserve(0, 100);
        cluster.run(1000);
    }
    cluster.replicas[0].is_cut = true;
    cluster.run(TERMS.lease_ms + TERMS.window_ms + TERMS.margin_ms + 1000);
    let share = |cluster: &Cluster| {
        cluster.store.as_ref().unwrap().replicas["r1"].holding(DAY).unwrap().share
    };
    let pinned = share(&cluster);
    assert!(pinned >= 3000);
    cluster.now_ms = MIDNIGHT - 3000;
    while cluster.now_ms < MIDNIGHT + 1900 {
        cluster.now_ms += 100;
        cluster.read(1, Purpose::Hold);
        cluster.arrive(1, true);
        assert_eq!(share(&cluster), pinned, "a slow clock has not reached midnight");
    }
}

#[test]
fn a_replica_that_is_cut_off_admits_at_most_the_floor_of_the_next_day() {
    let mut cluster = ready([0, 0]);
    while cluster.used(DAY, 0, |_| true) < 3000 {
        cluster.reserve(0, 100);
        cluster.run(1000);
    }
    cluster.replicas[0].is_cut = true;
    cluster.run(MIDNIGHT - cluster.now_ms + TERMS.margin_ms);
    assert!(!cluster.reserve(0, 6000 / 32 + 1));
    assert!(cluster.reserve(0, 6000 / 32));
    cluster.run(10_000);
    let dead = cluster.store.as_ref().unwrap().replicas["r1"].holding(DAY).unwrap().share;
    assert_eq!(dead, 6000 / 32, "the others have the rest");
}

#[test]
fn a_lower_limit_applies_without_the_broker() {
    let mut cluster = ready([0, 0]);
    for replica in 0..2 {
        cluster.replicas[replica].is_cut = true;
        cluster.change(replica, tenant(30, 1_000_000, 6000));
    }
    flood(&mut cluster, 0, 1);
    flood(&mut cluster, 1, 1);
    assert_eq!(cluster.used(REQUESTS, 0, |_| true), 30);
}

#[test]
fn a_limit_that_changes_during_a_write_is_not_exceeded() {
    let mut cluster = ready([0, 0]);
    cluster.now_ms += 6000;
    for replica in 0..2 {
        cluster.read(replica, Purpose::Hold);
        cluster.change(replica, tenant(30, 1_000_000, 6000));
        cluster.arrive(replica, true);
    }
    flood(&mut cluster, 0, 1);
    flood(&mut cluster, 1, 1);
    assert!(cluster.used(REQUESTS, 0, |_| true) <= 30);
}
