//! The arguments of `splitrail replay`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use splitrail_policy::queue::QueueConfig;
use splitrail_replay::{FetchBounds, Model, Scenario, coefficients};
use splitrail_sim::cluster::{ClusterConfig, CostModel, InsertAt};

use crate::named_value::named;

/// Runs a trace on a simulated cluster, in virtual time. Several policies or configurations give
/// one table; docs/replay.md describes the model.
#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// The trace: a router's record file, or one JSON object per line with `timestamp` (ms),
    /// `input_length`, `output_length` and `hash_ids`.
    #[arg(long)]
    pub(crate) trace: PathBuf,
    /// A router's configuration, for workers, flow and policy; can be given several times.
    #[arg(long)]
    pub(crate) config: Vec<PathBuf>,
    /// Two configurations, whose differences are tested for chance.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "config")]
    pub(crate) compare: Vec<PathBuf>,
    /// The configured model to replay, by default the first; of a record file, only its requests.
    #[arg(long)]
    pub(crate) serve: Option<String>,
    /// A policy by name, or as JSON in the form of a configuration; can be given several times.
    /// Replaces the configuration's own policy, which is named `configured`.
    #[arg(long)]
    pub(crate) policy: Vec<String>,
    /// The detail of the cluster model.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) model: ModelArg,
    /// The share of time for which all prefill workers would be busy if nothing were cached;
    /// determines the speed of the trace.
    #[arg(long, value_parser = positive, conflicts_with = "rate")]
    utilisation: Option<f64>,
    /// The speed of the trace relative to the recording.
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    /// Several utilisations, each of which gives a row.
    #[arg(long, value_delimiter = ',', value_parser = positive, conflicts_with_all = ["rate", "utilisation"])]
    pub(crate) loads: Vec<f64>,
    /// Spaces requests of the same timestamp evenly up to the next one.
    #[arg(long)]
    spread: bool,
    /// The seed of random choices and tie-breaks.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of prefill workers; by default as configured, or 8.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    prefill: Option<u32>,
    /// Number of decode workers; by default as configured, or 4.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    decode: Option<u32>,
    /// Tokens per block of the trace; by default from the record file, or 512.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) block_tokens: Option<u32>,
    /// Number of blocks in each prefill worker's cache, or `inf`.
    #[arg(long, default_value = "10000", value_parser = blocks)]
    capacity_blocks: usize,
    /// Number of blocks of prompts in each decode worker's cache, or `inf`; by default that of prefill
    /// workers if decode workers prefill (`--local`, or as configured).
    #[arg(long, value_parser = blocks)]
    dcap: Option<usize>,
    /// When computed blocks become available in the cache.
    #[arg(long, default_value = "end", value_parser = named::<InsertAt>(&["start", "end"]))]
    insert_at: InsertAt,
    /// Maximum tokens of one prefill iteration; 0 serves one whole request at a time.
    #[arg(long)]
    budget: Option<u32>,
    /// Refuses a request if this many requests wait at its worker.
    #[arg(long)]
    max_queue: Option<usize>,
    /// A decode worker that holds at least this share of a prompt's blocks computes the rest
    /// itself; `auto` learns the share. By default as configured, or never.
    #[arg(long, value_parser = local)]
    local: Option<LocalShare>,
    /// The time between tokens in milliseconds that `--local auto` must not exceed.
    #[arg(long, value_parser = positive, default_value_t = 200.0)]
    tbt_goal: f64,
    /// Tokens of a local prefill in one decode step; 0 for all.
    #[arg(long)]
    chunk: Option<u32>,
    /// How much of the shorter part of a mixed step adds to the longer part.
    #[arg(long, value_parser = not_negative)]
    kappa: Option<f64>,
    /// Lets workers fetch prefixes from each other where that is cheaper than computing, under
    /// `predicted_ttft`. By default as configured (`peer_fetch`).
    #[arg(long)]
    fetch: bool,
    /// The router learns the speed of the workers, from the configured or default costs on, while the
    /// cost options say how fast the workers are.
    #[arg(long)]
    learn: bool,
    /// Also says why the request at this position of the trace, from 0, was placed where it was.
    #[arg(long, value_name = "N")]
    pub(crate) explain: Option<usize>,
    /// Also reports where cache hits were lost.
    #[arg(long)]
    pub(crate) losses: bool,
    /// Writes the reports as JSON; `-` for standard output instead of the table.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// Writes one tab-separated line per request; with several rows, one file for each, with the
    /// row's number before the extension.
    #[arg(long)]
    pub(crate) dump: Option<PathBuf>,
    /// Draws TTFT percentiles and the hit share against the load.
    #[arg(long, requires = "loads")]
    pub(crate) svg: Option<PathBuf>,
    // Last, because the following arguments appear under its heading.
    #[command(flatten)]
    cost: CostArgs,
}

/// Coefficients that differ from the defaults.
#[derive(Args)]
#[command(next_help_heading = "Cost model")]
struct CostArgs {
    /// Seconds per prefill iteration.
    #[arg(long, value_parser = not_negative)]
    c0: Option<f64>,
    /// Seconds per computed token.
    #[arg(long, value_parser = not_negative)]
    c1: Option<f64>,
    /// Seconds per computed token for each token before it.
    #[arg(long, value_parser = not_negative)]
    c2: Option<f64>,
    /// Seconds per transfer.
    #[arg(long, value_parser = not_negative)]
    t0: Option<f64>,
    /// Bandwidth of a transfer in bytes per second.
    #[arg(long, value_parser = positive)]
    bw: Option<f64>,
    /// Bytes of KV per token.
    #[arg(long, value_parser = not_negative)]
    kv: Option<f64>,
    /// Seconds per decode step.
    #[arg(long, value_parser = positive)]
    d0: Option<f64>,
    /// Seconds per request in a decode step.
    #[arg(long, value_parser = not_negative)]
    d1: Option<f64>,
    /// Seconds per token of context in a decode step.
    #[arg(long, value_parser = not_negative)]
    d2: Option<f64>,
    /// Maximum tokens of KV that a decode worker can hold.
    #[arg(long)]
    kv_capacity: Option<u64>,
    /// Maximum number of requests at a decode worker.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: Option<u32>,
}

/// The detail of the cluster model.
#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum ModelArg {
    /// The plain model, which another implementation can reproduce to the nanosecond.
    #[default]
    Reference,
    /// Adds chunked prefill, transfers that wait for each other, and caches on decode workers.
    Engine,
}

impl ReplayArgs {
    /// The scenario of the command line; the configuration determines what the command line leaves
    /// open.
    pub(crate) fn scenario(&self, configured: &ConfiguredCluster) -> Scenario {
        let base = match self.model {
            ModelArg::Reference => Model::Reference.cluster(),
            ModelArg::Engine => Model::Engine.cluster(),
        };
        let assumed = configured.cost.unwrap_or(base.cost);
        let local = self.local.or(configured.local);
        let workers = |told: Option<u32>, count: Option<usize>, default| {
            told.map(|workers| workers as usize).or(count).unwrap_or(default)
        };
        // Local prefills need a cache on decode workers, or find nothing there.
        let decode_default = match local.is_some() {
            true => base.decode_cache_blocks.max(self.capacity_blocks),
            false => base.decode_cache_blocks,
        };
        let cluster = ClusterConfig {
            prefill_workers: workers(self.prefill, configured.prefill, base.prefill_workers),
            decode_workers: workers(self.decode, configured.decode, base.decode_workers),
            prefill_cache_blocks: self.capacity_blocks,
            decode_cache_blocks: self.dcap.unwrap_or(decode_default),
            insert_at: self.insert_at,
            budget_tokens: self.budget.map_or(base.budget_tokens, |b| (b > 0).then_some(b)),
            max_queue: self.max_queue,
            local_threshold: match local {
                Some(LocalShare::At(share)) => Some(share),
                _ => None,
            },
            chunk_tokens: self.chunk.unwrap_or(base.chunk_tokens),
            interference: self.kappa.unwrap_or(base.interference),
            kv_capacity_tokens: self.cost.kv_capacity.unwrap_or(base.kv_capacity_tokens),
            max_batch: self.cost.max_batch.unwrap_or(base.max_batch),
            cost: self.cost(assumed),
            ..base
        };
        Scenario {
            cluster,
            rate: self.rate.unwrap_or(1.0),
            utilisation: self.utilisation,
            spread: self.spread,
            queue: configured.queue.unwrap_or(Scenario::default().queue),
            auto_tbt_goal_ms: (local == Some(LocalShare::Auto)).then_some(self.tbt_goal),
            fetches: configured.fetches.or(self.fetch.then_some(FetchBounds::NONE)),
            seed: self.seed,
            learns: self.learn,
            assumed_coefficients: if self.learn {
                vec![coefficients(&assumed)]
            } else {
                Vec::new()
            },
        }
    }

    fn cost(&self, base: CostModel) -> CostModel {
        let (told, mut cost) = (&self.cost, base);
        for (told, coefficient) in [
            (told.c0, &mut cost.prefill_base_s),
            (told.c1, &mut cost.prefill_token_s),
            (told.c2, &mut cost.prefill_pair_s),
            (told.t0, &mut cost.transfer_base_s),
            (told.t0, &mut cost.fetch_base_s),
            (told.bw, &mut cost.transfer_bytes_per_s),
            (told.kv, &mut cost.kv_bytes_per_token),
            (told.d0, &mut cost.step_base_s),
            (told.d1, &mut cost.step_request_s),
            (told.d2, &mut cost.step_context_s),
        ] {
            *coefficient = told.unwrap_or(*coefficient);
        }
        cost
    }
}

/// The cluster that a configuration describes.
#[derive(Default)]
pub(crate) struct ConfiguredCluster {
    /// Number of its prefill workers.
    pub(crate) prefill: Option<usize>,
    /// Number of its other workers.
    pub(crate) decode: Option<usize>,
    /// The threshold for local prefills.
    pub(crate) local: Option<LocalShare>,
    /// The router's queue.
    pub(crate) queue: Option<QueueConfig>,
    /// The bounds of its peer fetches, if it has them.
    pub(crate) fetches: Option<FetchBounds>,
    /// The costs of its workers.
    pub(crate) cost: Option<CostModel>,
}

/// The minimum share of a prompt that a decode worker must hold to serve the request alone.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum LocalShare {
    /// This share.
    At(f64),
    /// The share that is learned.
    Auto,
}

fn local(text: &str) -> Result<LocalShare, String> {
    match text {
        "auto" => Ok(LocalShare::Auto),
        _ => not_negative(text).map(LocalShare::At).map_err(|told| format!("{told}, nor `auto`")),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |x| x > 0.0, "a number above 0")
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |x| x >= 0.0, "a number from 0 on")
}

fn number(text: &str, fits: impl Fn(f64) -> bool, wanted: &str) -> Result<f64, String> {
    let x: Option<f64> = text.parse().ok().filter(|x: &f64| x.is_finite() && fits(*x));
    x.ok_or_else(|| format!("not {wanted}"))
}

fn blocks(text: &str) -> Result<usize, String> {
    match text {
        "inf" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "not a number of blocks, nor `inf`".to_owned()),
    }
}
