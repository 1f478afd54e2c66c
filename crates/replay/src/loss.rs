//! Determines where a run's cache hits were lost.

use splitrail_policy::loss::{Loss, StepBlocks};
use splitrail_sim::cluster::{SimulationResult, Workload};

/// The best possible hits, the actual hits, and the reasons for the difference. Refused requests
/// were not placed and are left out.
///
/// Whether a block was computed, and which worker held it, is determined at the moment at which the
/// request was placed. Blocks that were held then and were gone when the prefill began are `stale`:
/// in a run without delays, they were evicted while the request waited at its worker.
pub fn loss(workload: &Workload, outcome: &SimulationResult) -> Loss {
    let mut computed_ns = vec![u64::MAX; workload.distinct_blocks() as usize];
    for (request, row) in outcome.rows.iter().enumerate().filter(|(_, row)| !row.rejected) {
        for block in workload.blocks(request) {
            let known_ns = &mut computed_ns[*block as usize];
            *known_ns = row.prefill_end_ns.min(*known_ns);
        }
    }
    let mut seen = vec![false; workload.distinct_blocks() as usize];
    let mut loss = Loss::default();
    for (request, row) in outcome.rows.iter().enumerate() {
        let blocks = workload.blocks(request);
        let leading = |there: &dyn Fn(usize) -> bool| {
            blocks.iter().take_while(|b| there(**b as usize)).count() as u32
        };
        if !row.rejected {
            loss.add(&StepBlocks {
                prompt_blocks: blocks.len() as u32,
                seen_blocks: leading(&|block| seen[block]),
                computed_blocks: leading(&|block| computed_ns[block] <= row.placed_ns),
                held_blocks: row.held_blocks,
                chosen_blocks: row.chosen_blocks,
                hit_blocks: row.hit_blocks,
                fetched_blocks: row.fetched_blocks,
                parity_broken: false,
            });
        }
        blocks.iter().for_each(|block| seen[*block as usize] = true);
    }
    loss
}

#[cfg(test)]
mod tests {
    use splitrail_sim::cluster::workload::WorkloadBuilder;
    use splitrail_sim::cluster::{Cluster, ClusterConfig, Decision, Placement, Router, run};

    use super::*;

    /// Places requests on given workers.
    struct FixedPlacements(&'static [usize]);

    impl Router for FixedPlacements {
        fn arrive(&mut self, _: &Cluster<'_>, request: usize) -> Decision {
            Decision::Prefill(Placement::on(self.0[request]))
        }
    }

    #[test]
    fn each_lost_block_has_its_reason() {
        let mut builder = WorkloadBuilder::new(512);
        for (at, blocks) in [
            (0.0, &[1, 2, 3][..]),
            // Arrives immediately: not computed yet, so cold.
            (0.0, &[1, 2]),
            // Held by the first worker, sent to the second, which holds two of the three.
            (60e3, &[1, 2, 3]),
            // Evicts everything from both.
            (120e3, &[7, 8, 9]),
            (120e3, &[7, 8, 9]),
            // Evicted.
            (180e3, &[1, 2, 3]),
        ] {
            builder.push(at, blocks.len() as u32 * 512, 1, blocks);
        }
        let workload = builder.finish();
        let config = ClusterConfig {
            prefill_workers: 2,
            prefill_cache_blocks: 3,
            ..ClusterConfig::default()
        };
        let arrivals = workload.arrivals_ns(1.0, false);
        let mut router = FixedPlacements(&[0, 1, 1, 0, 1, 0]);
        let outcome = run(&workload, &arrivals, &config, &mut router, &mut |_| {});
        let loss = loss(&workload, &outcome);
        assert_eq!((loss.best_blocks, loss.hit_blocks), (2 + 3 + 3 + 3, 2));
        assert_eq!((loss.cold_blocks, loss.evicted_blocks, loss.diverted_blocks), (2 + 3, 3, 1));
        assert_eq!((loss.stale_blocks, loss.parity_blocks), (0, 0));
    }
}
