//! Measures how long it takes to add, drain and remove a worker beside many others, and to make all
//! of them candidates of a decision.

use std::hint::black_box;
use std::time::Instant;

use splitrail_config::model::Role;
use splitrail_config::model::WorkerConfig;
use splitrail_fleet::ranks::rank_key;
use splitrail_fleet::{CandidateQuery, Roster, WorkerSource};
use splitrail_kv::{BlockHash, EngineHash, HashedBlock, Tier};
use splitrail_policy::Leg;

use super::options::Options;
use super::report::Report;
use super::router::{MODEL, Router};
use super::{Failure, block_on};
use crate::index::measure::Percentiles;
use crate::splitmix::mix;

/// Numbers of workers beside the one that joins and leaves.
const SIZES: [usize; 3] = [10, 100, 1000];
/// Number of blocks of the prompt, which all workers hold.
const PROMPT_BLOCKS: u64 = 64;

/// Runs the workload.
///
/// # Errors
/// A worker cannot be added, or is missing among the candidates.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let rounds = if options.quick { 200 } else { 2000 };
    SIZES.into_iter().try_for_each(|size| block_on(beside(size, rounds, report)))
}

async fn beside(size: usize, rounds: usize, report: &mut Report) -> Result<(), Failure> {
    let router = Router::start(16).await?;
    let (fleet, pool) = (&router.running.fleet, &router.served.pool);
    let prompt: Vec<HashedBlock> = (0..PROMPT_BLOCKS)
        .map(|place| HashedBlock { engine: EngineHash(mix(place)), hash: BlockHash(!mix(place)) })
        .collect();
    for number in 0..size {
        let worker = fleet.claim(MODEL, WorkerSource::Shim, worker(number)?)?;
        pool.index().store(rank_key(worker.index, 0), None, &prompt, Tier::Device);
        worker.set_probed(true, "a worker of the benchmark");
        worker.set_events_current(true);
    }
    let [mut joins, mut drains, mut leaves, mut copies, mut looks] = [(); 5].map(|()| Vec::new());
    let newcomer = worker(size)?;
    for _ in 0..rounds {
        let (id, config) = (newcomer.id.as_str(), newcomer.clone());
        time(&mut joins, || fleet.claim(MODEL, WorkerSource::Shim, config)).map(drop)?;
        time(&mut drains, || fleet.drain(MODEL, id, true))
            .ok_or("the worker is not in the fleet")?;
        time(&mut leaves, || fleet.revoke(MODEL, WorkerSource::Shim, id));
        let roster = pool.roster();
        time(&mut copies, || black_box(Roster::new(roster.iter().cloned().collect())));
    }
    let hashes: Vec<BlockHash> = prompt.iter().map(|block| block.hash).collect();
    let (roster, now) = (pool.roster(), Instant::now());
    for _ in 0..rounds {
        let (leg, exclusions) = (Leg::Aggregated, &[][..]);
        let query = CandidateQuery {
            leg,
            hashes: &hashes,
            prompt_tokens: 1 << 20,
            exclusions,
            readable_blocks: 0,
            takes_prefix: false,
            from: None,
            now,
        };
        let seen = time(&mut looks, || pool.candidates(&roster, query));
        let holds = |place: u64| u64::from(seen[place as usize].overlap_blocks) == PROMPT_BLOCKS;
        if seen.len() != size || !holds(0) || !holds(size as u64 - 1) {
            return Err("a candidate is missing, or has another overlap than its worker".into());
        }
    }
    let name = format!("membership W={size}");
    for (measure, samples) in [
        ("a worker joins, p50", &mut joins),
        ("a worker drains, p50", &mut drains),
        ("a worker leaves, p50", &mut leaves),
        ("copying the roster alone, p50", &mut copies),
        ("candidates of one leg, all of them, p50", &mut looks),
    ] {
        report.add(&name, measure, "us", Percentiles::of(samples).p50 / 1e3)?;
    }
    Ok(())
}

/// Calls `work` and adds its duration, in nanoseconds, to the samples.
fn time<T>(samples: &mut Vec<u64>, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    samples.push(start.elapsed().as_nanos() as u64);
    result
}

/// A worker that is reported by a shim, so that the router sends it no probes.
fn worker(number: usize) -> Result<WorkerConfig, Failure> {
    Ok(WorkerConfig {
        id: format!("w{number}"),
        role: Role::Both,
        url: format!("http://10.0.{}.{}:8000", number / 250, number % 250 + 1),
        kv_events: None,
        kv_replay: None,
        bootstrap: None,
        shim: true,
        supports_cache_hit_threshold: Some(true),
        data_parallel_ranks: None,
        transfer_group: None,
        location: None,
        takes_rank_header: None,
        costs: None,
    })
}
