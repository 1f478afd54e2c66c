//! What `splitrail replay` can be told.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use splitrail_policy::queue::QueueConfig;
use splitrail_replay::{Model, Scenario};
use splitrail_sim::cluster::{ClusterConfig, InsertAt};

/// Serves a trace on a cluster in virtual time. Several policies or configurations give one
/// table; docs/replay.md states the model.
#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// The trace: what a router has recorded, or one JSON object per line with `timestamp`
    /// (ms), `input_length`, `output_length` and `hash_ids`.
    #[arg(long)]
    pub(crate) trace: PathBuf,
    /// A router's configuration, for workers, flow and policy; may be given several times.
    #[arg(long)]
    pub(crate) config: Vec<PathBuf>,
    /// Two configurations, and which of their differences may be chance.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "config")]
    pub(crate) compare: Vec<PathBuf>,
    /// The configured model to replay, left out the first; of a record, only its requests.
    #[arg(long)]
    pub(crate) serve: Option<String>,
    /// A policy by name, or as JSON as a configuration would say it; may be given several
    /// times. Takes the place of the configuration's own, which is named `configured`.
    #[arg(long)]
    pub(crate) policy: Vec<String>,
    /// How much of a cluster is modelled.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) model: ModelArg,
    /// The share of the time for which all prefill workers would be busy if nothing were
    /// cached; sets how fast the trace runs.
    #[arg(long, value_parser = positive, conflicts_with = "rate")]
    utilisation: Option<f64>,
    /// How often the trace runs as fast as recorded.
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    /// Several utilisations, each a row: a sweep.
    #[arg(long, value_delimiter = ',', value_parser = positive, conflicts_with_all = ["rate", "utilisation"])]
    pub(crate) loads: Vec<f64>,
    /// Spaces requests of the same timestamp evenly up to the next one.
    #[arg(long)]
    spread: bool,
    /// For draws and ties.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Prefill workers; left out, as configured, or 8.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    prefill: Option<u32>,
    /// Decode workers; left out, as configured, or 4.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    decode: Option<u32>,
    /// Tokens of the trace's blocks; left out, what a record says, or 512.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) block_tokens: Option<u32>,
    /// Blocks in each prefill worker's cache, or `inf`.
    #[arg(long, default_value = "10000", value_parser = blocks)]
    capacity_blocks: usize,
    /// Blocks of prompts in each decode worker's cache, or `inf`.
    #[arg(long, value_parser = blocks)]
    dcap: Option<usize>,
    /// When computed blocks can be found.
    #[arg(long, value_enum, default_value_t)]
    insert_at: InsertAtArg,
    /// Tokens that one prefill iteration packs; 0 serves one whole request at a time.
    #[arg(long)]
    budget: Option<u32>,
    /// Refuses a request whose worker has so many waiting.
    #[arg(long)]
    max_queue: Option<usize>,
    /// Share of a prompt's blocks from which a decode worker that holds them computes the
    /// rest itself, or `auto`; left out, as configured, or never.
    #[arg(long, value_parser = local)]
    local: Option<Local>,
    /// Milliseconds between the tokens of a stream that `--local auto` keeps to.
    #[arg(long, value_parser = positive, default_value_t = 200.0)]
    tbt_goal: f64,
    /// Tokens of a local prefill beside one decode step; 0 for all.
    #[arg(long)]
    chunk: Option<u32>,
    /// How much of the shorter part of a mixed step adds to the longer one.
    #[arg(long, value_parser = not_negative)]
    kappa: Option<f64>,
    /// Says as well where cache hits were lost.
    #[arg(long)]
    pub(crate) losses: bool,
    /// Writes the reports as JSON; `-` for standard output in place of the table.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// Writes a tab-separated line per request; with several rows, one file for each, with its
    /// number before the extension.
    #[arg(long)]
    pub(crate) dump: Option<PathBuf>,
    /// Draws TTFT percentiles and the hit share against load.
    #[arg(long, requires = "loads")]
    pub(crate) svg: Option<PathBuf>,
    // Last: what follows would stand under its heading.
    #[command(flatten)]
    cost: CostArgs,
}

/// Coefficients, where they are not the default ones.
#[derive(Args)]
#[command(next_help_heading = "Cost model")]
struct CostArgs {
    /// Of a prefill iteration, in seconds.
    #[arg(long, value_parser = not_negative)]
    c0: Option<f64>,
    /// Of a computed token, in seconds.
    #[arg(long, value_parser = not_negative)]
    c1: Option<f64>,
    /// Of a computed token for each token before it, in seconds.
    #[arg(long, value_parser = not_negative)]
    c2: Option<f64>,
    /// Of a transfer, in seconds.
    #[arg(long, value_parser = not_negative)]
    t0: Option<f64>,
    /// Bandwidth of a transfer, in bytes per second.
    #[arg(long, value_parser = positive)]
    bw: Option<f64>,
    /// KV of a token, in bytes.
    #[arg(long, value_parser = not_negative)]
    kv: Option<f64>,
    /// Of a decode step, in seconds.
    #[arg(long, value_parser = positive)]
    d0: Option<f64>,
    /// Of a request in a decode step, in seconds.
    #[arg(long, value_parser = not_negative)]
    d1: Option<f64>,
    /// Of a token of context in a decode step, in seconds.
    #[arg(long, value_parser = not_negative)]
    d2: Option<f64>,
    /// Tokens of KV that a decode worker can hold.
    #[arg(long)]
    kv_capacity: Option<u64>,
    /// Requests that a decode worker can have at once.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: Option<u32>,
}

/// How much of a cluster is modelled.
#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum ModelArg {
    /// The plain model, which another implementation can follow to the nanosecond.
    #[default]
    Reference,
    /// Chunked prefill, transfers that wait for each other, caches on decode workers.
    Engine,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum InsertAtArg {
    Start,
    #[default]
    End,
}

impl ReplayArgs {
    /// What the command line says; a configuration may have its say on what it leaves open.
    pub(crate) fn scenario(&self, configured: &Configured) -> Scenario {
        let base = match self.model {
            ModelArg::Reference => Model::Reference.cluster(),
            ModelArg::Engine => Model::Engine.cluster(),
        };
        let local = self.local.or(configured.local);
        let workers = |told: Option<u32>, count: Option<usize>, default| {
            told.map(|workers| workers as usize).or(count).unwrap_or(default)
        };
        // A threshold that somebody configured needs something to hit.
        let decode_default = match configured.local.is_some() && self.local.is_none() {
            true => base.decode_cache_blocks.max(self.capacity_blocks),
            false => base.decode_cache_blocks,
        };
        let cluster = ClusterConfig {
            prefill_workers: workers(self.prefill, configured.prefill, base.prefill_workers),
            decode_workers: workers(self.decode, configured.decode, base.decode_workers),
            prefill_cache_blocks: self.capacity_blocks,
            decode_cache_blocks: self.dcap.unwrap_or(decode_default),
            insert_at: match self.insert_at {
                InsertAtArg::Start => InsertAt::Start,
                InsertAtArg::End => InsertAt::End,
            },
            budget_tokens: self.budget.map_or(base.budget_tokens, |b| (b > 0).then_some(b)),
            max_queue: self.max_queue,
            chunk_tokens: self.chunk.unwrap_or(base.chunk_tokens),
            interference: self.kappa.unwrap_or(base.interference),
            kv_capacity_tokens: self.cost.kv_capacity.unwrap_or(base.kv_capacity_tokens),
            max_batch: self.cost.max_batch.unwrap_or(base.max_batch),
            cost: self.cost(&base),
            ..base
        };
        Scenario {
            cluster,
            rate: self.rate.unwrap_or(1.0),
            utilisation: self.utilisation,
            spread: self.spread,
            local_threshold: match local {
                Some(Local::At(share)) => Some(share),
                _ => None,
            },
            queue: configured.queue.unwrap_or(Scenario::default().queue),
            auto_tbt_goal_ms: (local == Some(Local::Auto)).then_some(self.tbt_goal),
            seed: self.seed,
            ..Scenario::default()
        }
    }

    fn cost(&self, base: &ClusterConfig) -> splitrail_sim::cluster::CostModel {
        let (told, mut cost) = (&self.cost, base.cost);
        for (told, coefficient) in [
            (told.c0, &mut cost.prefill_base_s),
            (told.c1, &mut cost.prefill_token_s),
            (told.c2, &mut cost.prefill_pair_s),
            (told.t0, &mut cost.transfer_base_s),
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

/// What a configuration says of a cluster.
#[derive(Default)]
pub(crate) struct Configured {
    /// Its prefill workers.
    pub(crate) prefill: Option<usize>,
    /// Its other workers.
    pub(crate) decode: Option<usize>,
    /// From which share of a prompt on its decode workers serve alone.
    pub(crate) local: Option<Local>,
    /// How requests wait in the router.
    pub(crate) queue: Option<QueueConfig>,
}

/// From which share of a prompt on a decode worker serves alone.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Local {
    /// From this on.
    At(f64),
    /// From what is learned to pay.
    Auto,
}

fn local(text: &str) -> Result<Local, String> {
    match text {
        "auto" => Ok(Local::Auto),
        _ => not_negative(text).map(Local::At).map_err(|told| format!("{told}, nor `auto`")),
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
