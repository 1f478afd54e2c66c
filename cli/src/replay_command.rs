//! `splitrail replay`: runs a trace through the router's decisions, in virtual time.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use splitrail_config::{Flow, HitThreshold, Parts, Role};
use splitrail_policy::threshold::DEFAULT_THRESHOLD_RATIO;
use splitrail_replay::placement::PlacementRecord;
use splitrail_replay::trace::{self, TraceSelection};
use splitrail_replay::{
    Entry, FetchBounds, NamedPolicy, PolicyReport, compare, cost_model, svg, sweep, table,
};
use splitrail_settings::command::{Failure, exit, print_error, print_line};
use splitrail_sim::cluster::{SimulationResult, Workload};

use crate::explain_command::explanation_text;
use crate::progress::{ProgressBar, write_file};

mod args;

pub(crate) use args::ReplayArgs;

use args::{ConfiguredCluster, LocalShare};

/// The name of the configuration's own policy.
const CONFIGURED: &str = "configured";

/// The policy without a configuration.
const DEFAULT_POLICY: &str = "least_loaded";

/// Reads a trace from a file.
pub(crate) fn read_trace(path: &Path, select: TraceSelection<'_>) -> Result<Workload, Failure> {
    let failure =
        |code, error: &dyn Display| Failure::new(code, format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(|error| failure(exit::NO_INPUT, &error))?;
    trace::read(BufReader::new(file), select).map_err(|error| failure(exit::DATA_ERROR, &error))
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    let mut entries = entries(args)?;
    if !args.loads.is_empty() {
        entries = sweep(&entries, &args.loads);
    }
    let select = TraceSelection { block_tokens: args.block_tokens, model: args.serve.as_deref() };
    let workload = read_trace(&args.trace, select)?;
    let mut bar = ProgressBar::new(entries.len() * workload.requests().len());
    let mut reports = Vec::with_capacity(entries.len());
    // Two outcomes of the same traffic are compared.
    let mut outcomes = Vec::new();
    let mut explained = Vec::new();
    for (i, entry) in entries.iter().enumerate() {
        let before = i * workload.requests().len();
        let mut record = PlacementRecord::of(args.explain);
        let mut watch = |count| bar.at(before + count);
        let (outcome, report) = entry.serve_recording(&workload, &mut record, &mut watch);
        if let Some(request) = args.explain {
            explained.push(explain(request, &workload, &outcome, &report.policy, record));
        }
        if let Some(path) = &args.dump {
            let path = if entries.len() == 1 { path.clone() } else { numbered(path, i) };
            write_file(&path, |out| outcome.dump(out))?;
        }
        if entries.len() == 2 && args.loads.is_empty() {
            outcomes.push(outcome);
        }
        reports.push(report);
    }
    bar.clear();
    if let [first, second] = &outcomes[..] {
        reports[1].differences = Some(compare::compare(&workload, first, second));
    }
    write_reports(args, &reports)?;
    // Standard output is JSON alone.
    let is_json = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    for text in &explained {
        if is_json { print_error(text) } else { print_line(text)? }
    }
    Ok(())
}

/// Why a request of the trace was placed where it was.
fn explain(
    request: usize,
    workload: &Workload,
    outcome: &SimulationResult,
    policy: &str,
    record: PlacementRecord,
) -> String {
    let title = format!("\nrequest {request} under {policy}: ");
    let Some(row) = outcome.rows.get(request) else {
        return format!("{title}the trace has {} requests", outcome.rows.len());
    };
    let Some(mut placement) = record.into_placement() else {
        let why = match (row.rejected, row.prefill_worker) {
            (true, _) => "refused",
            (false, None) => "its decode worker computed the prompt",
            (false, Some(_)) => "only policies of a configuration can be explained",
        };
        return format!("{title}{why}");
    };
    let worker = row.prefill_worker.map(|worker| format!("p{worker}"));
    let decision = json!({
        "outcome": "ok",
        "prompt_blocks": workload.requests()[request].blocks,
        "prefill_worker": worker,
        "decode_worker": row.decode_worker.map(|worker| format!("d{worker}")),
        "ttft_ms": row.ttft_ns() as f64 / 1e6,
        "candidates": placement["candidates"].take(),
    });
    let choices = json!([{ "leg": "prefill", "chosen": worker }]);
    let cost_unit = placement["cost_unit"].take();
    let one = json!({ "cost_unit": cost_unit, "choices": choices, "decision": decision });
    title + &explanation_text(&json!({ "decisions": [one] }))
}

fn write_reports(args: &ReplayArgs, reports: &[PolicyReport]) -> Result<(), Failure> {
    if let Some(path) = &args.svg {
        write_file(path, |out| out.write_all(svg::svg(reports).as_bytes()))?;
    }
    let json = serde_json::to_string_pretty(reports).unwrap_or_default();
    match &args.json {
        Some(path) if path.as_os_str() == "-" => return print_line(&json),
        Some(path) => write_file(path, |out| writeln!(out, "{json}"))?,
        None => {}
    }
    print_line(table::table(reports).trim_end())?;
    if args.losses {
        print_line(&format!("\n{}", table::losses(reports).trim_end()))?;
    }
    if let [first, second] = reports
        && let Some(differences) = &second.differences
    {
        let text = compare::table(differences, &first.policy, &second.policy);
        print_line(&format!("\n{}", text.trim_end()))?;
    }
    Ok(())
}

/// One entry for each policy under each configuration.
fn entries(args: &ReplayArgs) -> Result<Vec<Entry>, Failure> {
    let mut entries = Vec::new();
    let configs = if args.compare.is_empty() { &args.config } else { &args.compare };
    let several = configs.len() > 1;
    for path in configs {
        let (configured, policy) = configuration(path, args.serve.as_deref())?;
        let scenario = args.scenario(&configured);
        for mut policy in policies(&args.policy, Some(&policy))? {
            if several {
                policy.name = format!("{}: {}", path.display(), policy.name);
            }
            entries.push(Entry { policy, scenario: scenario.clone() });
        }
    }
    if configs.is_empty() {
        let scenario = args.scenario(&ConfiguredCluster::default());
        for policy in policies(&args.policy, None)? {
            entries.push(Entry { policy, scenario: scenario.clone() });
        }
    }
    Ok(entries)
}

fn policies(
    names: &[String],
    configured: Option<&NamedPolicy>,
) -> Result<Vec<NamedPolicy>, Failure> {
    let named = |name: &str| {
        match configured {
        Some(policy) if name == CONFIGURED => Ok(policy.clone()),
        _ => NamedPolicy::parse(name).ok_or_else(|| {
            let names = NamedPolicy::names().join(", ");
            let message = format!(
                "--policy {name}: not the name of a policy ({names}, or one that a configuration can name)"
            );
            Failure::new(exit::USAGE, message)
        }),
    }
    };
    match (names, configured) {
        ([], Some(policy)) => Ok(vec![policy.clone()]),
        ([], None) => Ok(vec![named(DEFAULT_POLICY)?]),
        (names, _) => names.iter().map(|name| named(name)).collect(),
    }
}

/// The cluster and the policy that a configuration describes.
fn configuration(
    path: &Path,
    model: Option<&str>,
) -> Result<(ConfiguredCluster, NamedPolicy), Failure> {
    let loaded = splitrail_config::load(path, Parts::ALL)
        .map_err(|problems| Failure::of_problems(&problems, false))?;
    let models = loaded.config.models;
    let found = match model {
        Some(name) => models.into_iter().find(|model| model.name == name),
        None => models.into_iter().next(),
    };
    let Some(found) = found else {
        let message = format!("{} has no model {}", path.display(), model.unwrap_or_default());
        return Err(Failure::new(exit::CONFIG, message));
    };
    let count = |fits: fn(Role) -> bool| {
        let count = found.workers.iter().filter(|worker| fits(worker.role)).count();
        (count > 0).then_some(count)
    };
    let local = match found.flow {
        Flow::Aggregated => Some(LocalShare::At(0.0)),
        Flow::DecodeFirst => match found.cache_hit_threshold {
            Some(HitThreshold::Auto) => Some(LocalShare::Auto),
            Some(HitThreshold::Ratio(ratio)) => Some(LocalShare::At(ratio)),
            None => Some(LocalShare::At(DEFAULT_THRESHOLD_RATIO)),
        },
        Flow::Auto => match found.cache_hit_threshold {
            Some(HitThreshold::Ratio(ratio)) => Some(LocalShare::At(ratio)),
            Some(HitThreshold::Auto) | None => Some(LocalShare::Auto),
        },
        Flow::PrefillFirst => None,
    };
    let configured = ConfiguredCluster {
        prefill: count(|role| role == Role::Prefill),
        decode: count(|role| role != Role::Prefill),
        local,
        queue: found.queue.map(Into::into),
        fetches: found.fetches_prefixes().then_some(FetchBounds {
            min_tokens: found.peer_fetch_min_tokens,
            max_per_worker: found.peer_fetch_max_per_worker,
        }),
        cost: Some(cost_model(&found.costs.into())),
    };
    Ok((configured, NamedPolicy::of(found.policy, found.queue.is_some())))
}

fn numbered(path: &Path, number: usize) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}.{number}.{}", extension.to_string_lossy()),
        None => format!("{stem}.{number}"),
    };
    path.with_file_name(name)
}
