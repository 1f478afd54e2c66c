//! Limits of one router.

use std::sync::Arc;

use proptest::prelude::*;
use splitrail_config::TenantLimits;

use crate::limits::account::{Account, MINUTE_MS};
use crate::limits::window::DAY_MS;
use crate::limits::{LimitExceeded, LimitKind, Limits, Reservation, kind};

const START: u64 = DAY_MS * 20_000 - 90_000;

fn limits(requests: u64, minute: u64, day: u64) -> TenantLimits {
    let some = |limit| (limit > 0).then_some(limit);
    TenantLimits {
        requests_per_minute: some(requests),
        tokens_per_minute: some(minute),
        tokens_per_day: some(day),
        requests_in_flight: None,
    }
}

#[test]
fn a_request_beyond_a_limit_is_refused_and_admitted_after_the_named_time() {
    let limits = Limits::local(&limits(3, 1000, 5000), 1.0);
    let at = START + 1_000;
    let _first = limits.reserve(at, 600).unwrap();
    let _second = limits.reserve(at + 10_000, 400).unwrap();
    let refused = limits.reserve(at + 20_000, 500).unwrap_err();
    let LimitExceeded::Used { limit, retry_after_ms } = refused else { panic!("{refused}") };
    assert_eq!(limit, LimitKind::TokensPerMinute);
    assert!((MINUTE_MS - 20_000..=MINUTE_MS - 19_500).contains(&retry_after_ms), "{refused}");
    assert!(limits.reserve(at + 20_000 + retry_after_ms - 1, 500).is_err());
    assert!(limits.reserve(at + 20_000 + retry_after_ms, 500).is_ok());
}

#[test]
fn all_limits_count_a_request_or_none_does() {
    let limits = Limits::local(&limits(10, 1000, 1500), 1.0);
    let _first = limits.reserve(START, 1000).unwrap();
    let before = limits.standing(START);
    assert!(limits.reserve(START, 1).is_err());
    assert_eq!(limits.standing(START), before);
    let later = START + 61_000;
    let refused = limits.reserve(later, 501).unwrap_err();
    let retry_after_ms = DAY_MS * 20_000 - later;
    assert_eq!(refused, LimitExceeded::Used { limit: LimitKind::TokensPerDay, retry_after_ms });
    let _other_day = limits.reserve(later + retry_after_ms, 501).unwrap();
}

#[test]
fn a_request_that_is_larger_than_a_limit_is_refused_for_good() {
    let limits = Limits::local(&limits(10, 1000, 900), 1.0);
    let refused = limits.reserve(START, 1001).unwrap_err();
    let limit = LimitKind::TokensPerMinute;
    assert_eq!(refused, LimitExceeded::TooLarge { limit, maximum: 1000 });
    let refused = limits.reserve(START, 901).unwrap_err();
    assert_eq!(refused, LimitExceeded::TooLarge { limit: LimitKind::TokensPerDay, maximum: 900 });
}

#[test]
fn a_router_admits_its_share_of_each_limit() {
    let limits = Limits::local(&limits(10, 1000, 3), 0.25);
    let standing = limits.standing(START);
    assert_eq!(standing.requests.unwrap().limit, 2);
    assert_eq!(standing.tokens_per_minute.unwrap().remaining, 250);
    assert_eq!(standing.tokens_per_day.unwrap().limit, 1, "no limit becomes 0");
}

#[test]
fn used_amounts_stay_when_a_limit_changes() {
    let tenant = Limits::local(&limits(0, 0, 0), 1.0);
    let _used = tenant.reserve(START, 700).unwrap();
    tenant.change(&limits(2, 1000, 0), 1.0, START);
    assert_eq!(tenant.standing(START).tokens_per_minute.unwrap().remaining, 300);
    assert_eq!(tenant.standing(START).requests.unwrap().remaining, 1);
    tenant.change(&limits(2, 500, 0), 1.0, START);
    assert_eq!(tenant.standing(START).tokens_per_minute.unwrap().remaining, 0);
    assert!(tenant.reserve(START, 1).is_err());
}

#[test]
fn more_than_was_reserved_is_counted_and_delays_later_requests() {
    let tenant = Limits::local(&limits(0, 1000, 0), 1.0);
    tenant.reserve(START, 100).unwrap().settle(1500);
    assert_eq!(tenant.standing(START).tokens_per_minute.unwrap().remaining, 0);
    assert!(tenant.reserve(START, 1).is_err());
    assert!(tenant.reserve(START + 60_500, 1).is_ok());
}

#[test]
fn a_dropped_reservation_refunds_its_tokens_but_not_the_request() {
    let tenant = Limits::local(&limits(2, 1000, 0), 1.0);
    drop(tenant.reserve(START, 900).unwrap());
    let standing = tenant.standing(START);
    assert_eq!(standing.tokens_per_minute.unwrap().remaining, 1000);
    assert_eq!(standing.requests.unwrap().remaining, 1);
    assert_eq!(standing.tokens_per_day, None);
}

#[test]
fn a_clock_that_goes_back_frees_nothing() {
    let tenant = Limits::local(&limits(1, 0, 0), 1.0);
    let _used = tenant.reserve(START, 1).unwrap();
    assert!(tenant.reserve(START - 3_600_000, 1).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Reserve(u64),
    /// Settles a reservation, at these percent of its tokens.
    Settle(usize, u64),
    Cancel(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_u64..3_000).prop_map(Step::Wait),
        1 => (0_u64..100_000).prop_map(Step::Wait),
        8 => (0_u64..400).prop_map(Step::Reserve),
        3 => (any::<usize>(), 0_u64..=100).prop_map(|(which, percent)| Step::Settle(which, percent)),
        1 => any::<usize>().prop_map(Step::Cancel),
    ];
    prop::collection::vec(step, 1..250)
}

/// A request that was admitted: when, with how many tokens, as far as it is known.
struct Admitted {
    at_ms: u64,
    tokens: u64,
}

fn sums(all: &[Admitted], is_counted: impl Fn(u64) -> bool) -> (u64, u64) {
    let counted = all.iter().filter(|admitted| is_counted(admitted.at_ms));
    counted.fold((0, 0), |(requests, tokens), admitted| (requests + 1, tokens + admitted.tokens))
}

proptest! {
    /// In no window more than the limit is admitted; nothing is refused that would fit, but for the
    /// half second at the edge of the window; what is settled is what counts, to the token.
    #[test]
    fn every_window_stays_within_the_limits(
        steps in steps(),
        (requests, minute, day) in (1_u64..30, 400_u64..3000, 400_u64..10_000),
    ) {
        let tenant = Limits::local(&limits(requests, minute, day), 1.0);
        let (mut now, mut all) = (START, Vec::<Admitted>::new());
        let mut open: Vec<(Reservation, usize)> = Vec::new();
        for step in steps {
            match step {
                Step::Wait(ms) => now += ms,
                Step::Reserve(tokens) => {
                    let admitted = tenant.reserve(now, tokens);
                    let is_admitted = admitted.is_ok();
                    let young = |age: u64| move |at: u64| at + age > now;
                    if let Ok(reservation) = admitted {
                        open.push((reservation, all.len()));
                        all.push(Admitted { at_ms: now, tokens });
                        let (used_requests, used) = sums(&all, young(60_000));
                        prop_assert!(used_requests <= requests && used <= minute);
                    }
                    let (used_requests, used) = sums(&all, young(60_500));
                    let (_, used_today) = sums(&all, |at| at / DAY_MS == now / DAY_MS);
                    prop_assert!(used_today <= day);
                    let fits = used_requests < requests
                        && used + tokens <= minute
                        && used_today + tokens <= day;
                    prop_assert!(is_admitted || !fits);
                    let told = tenant.standing(now).tokens_per_day.unwrap();
                    prop_assert_eq!(told.remaining, day - used_today);
                }
                Step::Settle(which, percent) if !open.is_empty() => {
                    let (reservation, index) = open.swap_remove(which % open.len());
                    let actual = all[index].tokens * percent / 100;
                    reservation.settle(actual);
                    all[index].tokens = actual;
                }
                Step::Cancel(which) if !open.is_empty() => {
                    let (reservation, index) = open.swap_remove(which % open.len());
                    drop(reservation);
                    all[index].tokens = 0;
                }
                Step::Settle(..) | Step::Cancel(_) => {}
            }
        }
    }

    /// After the time that a refused request is told, the same request is admitted, and not before.
    #[test]
    fn a_refusal_says_when_the_request_will_fit(
        requests in prop::collection::vec((0_u64..8_000, 0_u64..400), 1..100),
    ) {
        let mut account = Account::new(kind::shares(&limits(10, 1000, 5000), 1.0), MINUTE_MS, None);
        let mut now = START;
        for (pause, tokens) in requests {
            now += pause;
            let mut copy = account.clone();
            let Err(LimitExceeded::Used { retry_after_ms, .. }) = account.reserve(now, tokens) else {
                continue;
            };
            prop_assert!(copy.clone().reserve(now + retry_after_ms - 1, tokens).is_err());
            prop_assert!(copy.reserve(now + retry_after_ms, tokens).is_ok());
        }
    }
}

#[test]
fn threads_together_admit_the_limit_and_no_more() {
    let tenant = Limits::local(&limits(1000, 0, 0), 1.0);
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let tenant = Arc::clone(&tenant);
                scope.spawn(move || (0..500).filter(|_| tenant.reserve(START, 3).is_ok()).count())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 1000);
}
