//! `splitrail bench`: a bounded load on one's own cluster, under the policy of the configuration and,
//! in turns, under another one.
//!
//! Each policy has a router of its own, in this process and on loopback, in front of the same engines.
//! A router in service is not touched.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::json;
use splitrail_config::model::{
    AccessLogConfig, AuditConfig, Ledger, Listen, Model, PeerFetch, Policy, PrewarmConfig, Quotas,
    RecordConfig, TracingConfig,
};
use splitrail_config::{BlockSize, Config};
use splitrail_replay::named::kind_of;
use splitrail_replay::svg;
use splitrail_replay::trace::TraceSelection;
use splitrail_router::assemble::assemble;
use splitrail_router::run::{Running, wait_ready};
use splitrail_settings::command::{Failure, exit};

use crate::not_assembled;
use crate::progress::{ProgressBar, write_file};
use crate::replay_command::read_trace;

mod client;
mod prompts;
mod report;

use client::{Load, Outcome};
use prompts::{Prompts, synthetic_agents};
use report::PolicyFigures;

/// The policies take turns, so that a change of the cluster's speed hits both: each has this many
/// turns.
const TURNS: usize = 4;

/// Maximum time for a router to be ready.
const READY_MAX: Duration = Duration::from_secs(60);

/// Tokens per block of the synthetic sessions, if the configuration names no size.
const BLOCK_TOKENS: u32 = 16;

/// Runs a bounded load on a cluster, and compares two policies.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// A router's configuration. Its listeners, keys, limits of tenants and files are not used: the
    /// load goes through routers of this process, on loopback, to the same engines.
    #[arg(long)]
    config: PathBuf,
    /// The policy to compare with, by name, or as JSON in the form of a configuration; `none`: no
    /// other policy.
    #[arg(long, default_value = "round_robin", value_parser = Against::parse)]
    against: Against,
    /// Number of requests under each policy.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,
    /// Number of requests at the same time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,
    /// `agents` (synthetic sessions that send a growing history), or a file: the record of a
    /// router, or a trace as for `replay`, whose prompts are made up from the names of their blocks.
    #[arg(long, value_name = "FILE|agents", default_value = AGENTS)]
    from: String,
    /// The configured model; by default the first.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Writes a picture of the result (SVG).
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

const AGENTS: &str = "agents";

/// What the policy of the configuration is compared with.
#[derive(Clone, Debug)]
enum Against {
    Nothing,
    Policy(Policy),
}

impl Against {
    fn parse(text: &str) -> Result<Self, String> {
        let value = match text {
            "none" => return Ok(Self::Nothing),
            text if text.starts_with('{') => serde_json::from_str(text),
            name => Ok(json!({ "kind": name })),
        };
        let policy = value.and_then(serde_json::from_value);
        policy.map(Self::Policy).map_err(|error| error.to_string())
    }
}

/// Runs the load; returns what to print.
///
/// # Errors
/// The configuration or the trace cannot be used, no router becomes ready, or no request succeeds.
pub(crate) async fn run(args: BenchArgs) -> Result<String, Failure> {
    let loaded = splitrail_config::load(&args.config, splitrail_router::PARTS)
        .map_err(|problems| Failure::of_problems(&problems, false))?;
    let config = one_model(loaded.config, args.model.as_deref())?;
    let model = &config.models[0];
    let prompts = prompts(&args, model)?;
    let mut sides = vec![Side::start(config.clone()).await?];
    if let Against::Policy(policy) = &args.against
        && *policy != model.policy
    {
        sides.push(Side::start(under(config.clone(), policy.clone())).await?);
    }
    for side in &sides {
        if let Some(reason) = wait_ready(&side.router.core, READY_MAX).await {
            let message = format!("the router of {} did not become ready: {reason}", side.policy);
            return Err(Failure::new(exit::UNAVAILABLE, message));
        }
    }
    let concurrency = usize::from(args.concurrency);
    take_turns(&mut sides, &model.name, &prompts, concurrency).await;
    let mut figures = Vec::with_capacity(sides.len());
    for Side { policy, router, outcomes, busy, .. } in sides {
        router.drain().await;
        figures.push(PolicyFigures::of(policy, &outcomes, busy));
    }
    if figures.iter().all(|figures| figures.served == 0) {
        let message = format!("no request was served\n{}", report::text(&figures));
        return Err(Failure::new(exit::UNAVAILABLE, message));
    }
    if let Some(path) = &args.picture {
        let picture = svg::bars(&report::panels(&figures));
        write_file(path, |out| std::io::Write::write_all(out, picture.as_bytes()))?;
    }
    Ok(report::text(&figures))
}

/// The prompts of all turns.
fn prompts(args: &BenchArgs, model: &Model) -> Result<Prompts, Failure> {
    let requests = args.requests as usize;
    if args.from == AGENTS {
        let block_tokens = match model.block_size {
            BlockSize::Tokens(tokens) => tokens,
            BlockSize::Auto => BLOCK_TOKENS,
        };
        return Ok(synthetic_agents(requests, TURNS, block_tokens));
    }
    let select = TraceSelection { model: Some(&model.name), ..TraceSelection::default() };
    let workload = read_trace(Path::new(&args.from), select)?;
    Ok(Prompts::of_trace(&workload, requests, TURNS))
}

/// The configuration of a router for one model that nobody else uses and that writes no files.
fn one_model(config: Config, name: Option<&str>) -> Result<Config, Failure> {
    let mut models = config.models.into_iter();
    let model = models.find(|model| name.is_none_or(|name| model.name == name));
    let Some(model) = model else {
        let message = format!("the configuration has no model {}", name.unwrap_or_default());
        return Err(Failure::new(exit::CONFIG, message));
    };
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut limits = config.limits;
    limits.drain_delay = Duration::ZERO;
    Ok(Config {
        listen: Listen { http: any.into(), admin: any.into(), ..Listen::default() },
        limits,
        ledger: Ledger { log_interval: Duration::ZERO, ..Ledger::default() },
        record: RecordConfig::default(),
        audit: AuditConfig::default(),
        access_log: AccessLogConfig { enabled: false, ..AccessLogConfig::default() },
        tracing: TracingConfig::default(),
        auth: Vec::new(),
        tenants: Vec::new(),
        quotas: Quotas::default(),
        // Prefixes that other routers' clients use are not to be moved.
        models: vec![Model { prewarm: PrewarmConfig::default(), ..model }],
        ..config
    })
}

/// The same under another policy, without what only `predicted_ttft` can have.
fn under(mut config: Config, policy: Policy) -> Config {
    let model = &mut config.models[0];
    if !matches!(policy, Policy::PredictedTtft { .. }) {
        (model.queue, model.peer_fetch) = (None, PeerFetch::Off);
    }
    model.policy = policy;
    config
}

/// A router with its policy, and what came of its requests.
struct Side {
    policy: String,
    router: Running,
    outcomes: Vec<Outcome>,
    /// The time in which it had requests.
    busy: Duration,
}

impl Side {
    async fn start(config: Config) -> Result<Self, Failure> {
        let policy = kind_of(&config.models[0].policy);
        let listen = config.listen.clone();
        let core = assemble(config, None).map_err(not_assembled)?;
        let router = Running::start(core, &listen).await?;
        Ok(Self { policy, router, outcomes: Vec::new(), busy: Duration::ZERO })
    }
}

/// Has the sides serve all turns. The prompts of a turn have the same lengths and shared prefixes for
/// both sides, and other tokens, so that no turn finds what another one has left in a cache. A first
/// short turn of each side, in which its router learns the speed of the engines, does not count.
async fn take_turns(sides: &mut [Side], model: &str, prompts: &Prompts, concurrency: usize) {
    let total: usize = prompts.turns().iter().map(Vec::len).sum::<usize>() * sides.len();
    let mut bar = ProgressBar::new(total);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut seed = since_1970.as_nanos() as u64;
    let mut served = 0;
    let first = &prompts.turns()[0];
    let warm_up = [&first[..concurrency.min(first.len())]];
    let turns = warm_up.into_iter().chain(prompts.turns().iter().map(Vec::as_slice));
    for (number, turn) in turns.enumerate() {
        let mut order: Vec<usize> = (0..sides.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for index in order {
            seed = seed.wrapping_add(1);
            let side = &mut sides[index];
            let address = side.router.addresses.http;
            let load = Load { address, model, block_tokens: prompts.block_tokens(), seed };
            let started = std::time::Instant::now();
            let outcomes = load.run(turn, concurrency, &mut |count| bar.at(served + count)).await;
            if number > 0 {
                side.busy += started.elapsed();
                served += outcomes.len();
                side.outcomes.extend(outcomes);
            }
        }
    }
    bar.clear();
}
