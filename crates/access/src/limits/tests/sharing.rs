//! Any interleaving of what replicas and the broker can do stays within the limits.

use proptest::prelude::*;
use splitrail_config::TenantLimits;

use super::cluster::{Cluster, tenant};
use crate::limits::LimitKind;
use crate::limits::holdings::floor;
use crate::limits::plan::Purpose;

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Reserve(usize, u64),
    /// As many requests as are admitted, up to a bound.
    Flood(usize, u64),
    Settle(usize, usize, u64),
    Cancel(usize, usize),
    Read(usize),
    Arrive(usize, bool),
    LoseWrite(usize),
    Pass,
    Run(u64),
    Cut(usize),
    Heal(usize),
    CutAll,
    HealAll,
    Restart(usize),
    Leave(usize),
    Change(usize, u64),
    ChangeAll(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let at = || 0_usize..3;
    prop_oneof![
        6 => (0_u64..1_500).prop_map(Step::Wait),
        2 => (0_u64..30_000).prop_map(Step::Wait),
        1 => (0_u64..150_000).prop_map(Step::Wait),
        8 => (at(), 0_u64..800).prop_map(|(at, tokens)| Step::Reserve(at, tokens)),
        10 => (at(), 1_u64..60).prop_map(|(at, tokens)| Step::Flood(at, tokens)),
        4 => (at(), any::<usize>(), 0_u64..=100).prop_map(|(at, one, percent)| Step::Settle(at, one, percent)),
        2 => (at(), any::<usize>()).prop_map(|(at, one)| Step::Cancel(at, one)),
        10 => at().prop_map(Step::Read),
        10 => (at(), prop::bool::weighted(0.9)).prop_map(|(at, is_told)| Step::Arrive(at, is_told)),
        1 => at().prop_map(Step::LoseWrite),
        12 => Just(Step::Pass),
        8 => (0_u64..20_000).prop_map(Step::Run),
        1 => at().prop_map(Step::Cut),
        2 => at().prop_map(Step::Heal),
        1 => Just(Step::CutAll),
        2 => Just(Step::HealAll),
        1 => at().prop_map(Step::Restart),
        1 => at().prop_map(Step::Leave),
        1 => (at(), 6_u64..=20).prop_map(|(at, tenths)| Step::Change(at, tenths)),
        1 => (6_u64..=20).prop_map(Step::ChangeAll),
    ]
}

/// The limits, times a number of tenths, of which each replica that is absent keeps a floor. The
/// limit of a day is used up in a few minutes, or never.
fn limits(tenths: u64, is_day_short: bool) -> TenantLimits {
    tenant(6 * tenths, 100 * tenths, if is_day_short { 400 } else { 100_000 } * tenths)
}

fn apply(cluster: &mut Cluster, step: &Step, is_day_short: bool) {
    match *step {
        Step::Wait(ms) => cluster.now_ms += ms,
        Step::Reserve(at, tokens) => _ = cluster.reserve(at, tokens),
        Step::Flood(at, tokens) => while cluster.reserve(at, tokens) {},
        Step::Settle(at, which, percent) => cluster.settle(at, which, percent),
        Step::Cancel(at, which) => cluster.cancel(at, which),
        Step::Read(at) => cluster.read(at, Purpose::Hold),
        Step::Arrive(at, is_acknowledged) => cluster.arrive(at, is_acknowledged),
        Step::LoseWrite(at) => cluster.lose_write(at),
        Step::Pass => cluster.pass(),
        Step::Run(ms) => cluster.run(ms),
        Step::Cut(at) => cluster.replicas[at].is_cut = true,
        Step::Heal(at) => cluster.replicas[at].is_cut = false,
        Step::CutAll => cluster.replicas.iter_mut().for_each(|replica| replica.is_cut = true),
        Step::HealAll => cluster.replicas.iter_mut().for_each(|replica| replica.is_cut = false),
        Step::Restart(at) => cluster.restart(at),
        Step::Leave(at) => {
            cluster.lose_write(at);
            cluster.read(at, Purpose::Leave);
            cluster.arrive(at, true);
            cluster.restart(at);
        }
        Step::Change(at, tenths) => cluster.change(at, limits(tenths, is_day_short)),
        Step::ChangeAll(tenths) => {
            for at in 0..cluster.replicas.len() {
                cluster.change(at, limits(tenths, is_day_short));
            }
        }
    }
}

/// In the last minute, and today by each clock: what was admitted within shares is at most the
/// limit, and each replica that had no share yet has admitted at most its floor in addition.
fn check(cluster: &Cluster) -> Result<(), TestCaseError> {
    for kind in LimitKind::ALL {
        let limit = cluster.limit(kind);
        for by in 0..cluster.replicas.len() {
            let used = cluster.used(kind, by, |one| !one.without_share.contains(&kind));
            prop_assert!(used <= limit, "{kind:?}: {used} of {limit} at {}", cluster.now_ms);
            let id = cluster.replicas[by].id.as_str();
            let without_share = cluster
                .used(kind, by, |one| one.replica == id && one.without_share.contains(&kind));
            prop_assert!(without_share <= floor(limit), "{kind:?}: {without_share}");
            let (counted, told) = cluster.day_of(by);
            prop_assert_eq!(counted, told, "what was told is what counts");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn replicas_never_admit_more_than_the_limit_together(
        steps in prop::collection::vec(step(), 1..400),
        skews_ms in prop::collection::vec(-2_000_i64..=2_000, 3),
        is_day_short in any::<bool>(),
    ) {
        let mut cluster = Cluster::start(limits(10, is_day_short), &skews_ms);
        for step in &steps {
            apply(&mut cluster, step, is_day_short);
            check(&cluster)?;
        }
    }
}
