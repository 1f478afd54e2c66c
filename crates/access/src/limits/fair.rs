//! How a limit is divided among replicas.

/// Divides `available` among replicas with these needs: each gets what it needs, or, if there is not
/// enough, an equal part but not more than its need (max-min fairness). All of `available` is used if
/// there is not enough.
pub(crate) fn by_need(needs: &[u64], available: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|&replica| needs[replica]);
    let mut rest = available;
    let mut parts = vec![0; needs.len()];
    for (position, &replica) in order.iter().enumerate() {
        let others = (order.len() - position) as u64;
        // Rounded up for as many as there are units left over.
        let part = needs[replica].min(rest.div_ceil(others));
        parts[replica] = part;
        rest -= part;
    }
    parts
}

/// The target of one replica: its part by need, and an equal part of what nobody needs, up to
/// `spare_max`.
pub(crate) fn target(needs: &[u64], replica: usize, available: u64, spare_max: u64) -> u64 {
    let parts = by_need(needs, available);
    let rest = available - parts.iter().sum::<u64>();
    let replicas = needs.len() as u64;
    let spare = rest / replicas + u64::from((replica as u64) < rest % replicas);
    parts[replica] + spare.min(spare_max)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_fair_and_waste_nothing(
            needs in prop::collection::vec(0_u64..100, 1..8),
            available in 0_u64..300,
        ) {
            let parts = by_need(&needs, available);
            let sum: u64 = parts.iter().sum();
            prop_assert_eq!(sum, available.min(needs.iter().sum()));
            for (part, need) in parts.iter().zip(&needs) {
                prop_assert!(part <= need);
                let most = parts.iter().max().unwrap_or(&0);
                prop_assert!(part == need || part + 1 >= *most, "{:?} of {:?}", parts, needs);
            }
            let targets = (0..needs.len()).map(|replica| target(&needs, replica, available, u64::MAX));
            prop_assert_eq!(targets.sum::<u64>(), available);
        }
    }
}
