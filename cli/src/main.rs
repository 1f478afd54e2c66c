//! The `splitrail` command.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use splitrail_router::assemble::AssembleError;
use splitrail_router::core::Core;
use splitrail_router::reload::WatchedFile;
use splitrail_router::run::{Running, Signals, until_stopped, wait_ready};
use splitrail_settings::command::{
    AboutCommand, Build, Failure, describe, exit, finish, parse, print_line, variable_name,
};
use splitrail_settings::logging::{LineQueue, queue_lines, warn_of};
use splitrail_settings::process::raise_descriptor_limit;
use splitrail_settings::service_manager::tell_ready;
use splitrail_settings::variables::schema_with_variables;
use splitrail_telemetry::logging::{self, LevelFilter, LogFormat};

mod admin;
mod bench_command;
mod change;
mod check_command;
mod cluster;
mod drain_command;
mod explain_command;
mod health_command;
mod keys_command;
mod named_value;
mod output;
mod progress;
mod quickstart;
mod reload_command;
mod replay_command;
mod safe_text;
mod serve_args;
mod sim_engine;
mod status_command;
mod table;
mod top_command;
mod usage_command;
mod workers_command;

use bench_command::BenchArgs;
use check_command::CheckArgs;
use drain_command::{DrainArgs, UndrainArgs};
use explain_command::ExplainArgs;
use health_command::HealthArgs;
use keys_command::KeysArgs;
use output::Output;
use quickstart::{QuickstartArgs, QuickstartError};
use reload_command::ReloadArgs;
use replay_command::ReplayArgs;
use serve_args::ServeArgs;
use sim_engine::SimArgs;
use status_command::StatusArgs;
use top_command::TopArgs;
use usage_command::UsageArgs;
use workers_command::WorkersArgs;

/// A request makes some hundred small allocations and a few of its body's size; with glibc's
/// allocator they take a sixth of a router's processor time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The program. `release/README.md` says how it is optimised with an execution profile.
const BUILD: Build = Build {
    program: "splitrail",
    version: env!("CARGO_PKG_VERSION"),
    commit: option_env!("SPLITRAIL_COMMIT"),
    features: &[
        ("kubernetes", splitrail_router::PARTS.kubernetes),
        ("nats", splitrail_router::PARTS.nats),
        ("otlp", splitrail_router::PARTS.otlp),
    ],
    is_profile_guided: cfg!(profile_guided),
};

/// A front door for LLM clusters with disaggregated prefill and decode.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The format of log lines: `text` or `json`. `RUST_LOG` sets the filter: by default `info`,
    /// of `quickstart` and `bench` `warn`.
    #[arg(long, value_name = "FORMAT", global = true, value_enum, default_value_t)]
    #[arg(hide_possible_values = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the router.
    Serve(ServeArgs),
    /// Runs a simulated P/D cluster and the router in front of it, on loopback.
    Quickstart(QuickstartArgs),
    /// Runs one simulated engine.
    SimEngine(Box<SimArgs>),
    /// Runs a trace through a policy on a simulated cluster, in virtual time.
    Replay(Box<ReplayArgs>),
    /// Runs a bounded load on a cluster, and compares two policies.
    Bench(BenchArgs),
    /// Checks a configuration, and with `--connect` the engines that it names.
    Check(CheckArgs),
    /// Shows the cluster as it is now, over all routers that are named.
    Top(TopArgs),
    /// Shows whether all is well, over all routers that are named.
    Status(StatusArgs),
    /// Lists all workers, over all routers that are named.
    Workers(WorkersArgs),
    /// Takes a worker out of service on all routers that are named.
    Drain(DrainArgs),
    /// Takes a worker back into service on all routers that are named.
    Undrain(UndrainArgs),
    /// Has all routers that are named read their configuration files again.
    Reload(ReloadArgs),
    /// Asks a running router where a request would be or was placed, and why.
    Explain(ExplainArgs),
    /// Asks one listener whether the router answers, for health checks of containers.
    Health(HealthArgs),
    /// Manages the API keys of clients and operators.
    Keys(KeysArgs),
    /// Sums the ledger file by tenant and model.
    Usage(UsageArgs),
    /// Prints the JSON Schema of the configuration, for editors.
    Schema {
        /// Prints the reference as Markdown instead.
        #[arg(long)]
        markdown: bool,
    },
    #[command(flatten)]
    About(AboutCommand),
}

/// The variable of the environment for a flag. The flags of `serve`, and those that have the same
/// meaning for several commands, have short names.
fn variable(path: &[&str], flag: &str) -> String {
    let is_common = match path {
        [] => true,
        // `--admin` of all other commands is the address of a router that runs.
        ["serve"] => flag != "admin",
        ["check"] => flag == "config",
        // Its `--admin-port` is not a flag of other commands.
        ["quickstart"] => false,
        _ => flag == "admin" || flag.starts_with("admin-") || flag == "all-addresses",
    };
    let path = if is_common { &[] } else { path };
    variable_name(&[&["SPLITRAIL"], path, &[flag]].concat())
}

fn main() -> ExitCode {
    let args: Args = match parse(&BUILD, variable) {
        Ok(args) => args,
        Err(code) => return code,
    };
    // Where to send a request, or what a load has shown, is not to stand among lines of the router.
    let level = match args.command {
        Command::Quickstart(_) | Command::Bench(_) => LevelFilter::WARN,
        _ => LevelFilter::INFO,
    };
    logging::init(args.log_format, level);
    // The output of commands that keep running is only read as logs.
    let runs_on =
        matches!(args.command, Command::Serve(_) | Command::Quickstart(_) | Command::SimEngine(_));
    let logs = runs_on && args.log_format == LogFormat::Json;
    let ended = match tokio::runtime::Runtime::new() {
        Ok(runtime) => {
            let ended = runtime.block_on(run(args.command, logs));
            // Does not wait for prompts that are still being computed.
            runtime.shutdown_background();
            ended
        }
        Err(error) => Err(error.into()),
    };
    finish(ended, logs)
}

async fn run(command: Command, logs: bool) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve(args, logs).await,
        Command::Quickstart(args) => run_quickstart(&args).await,
        Command::SimEngine(args) => sim_engine::run(*args).await,
        Command::Replay(args) => replay_command::run(&args),
        Command::Bench(args) => print_line(&bench_command::run(args).await?),
        Command::Check(args) => check_command::run(&args).await?.print(),
        Command::Top(args) => top_command::run(args).await?.map_or(Ok(()), Output::print),
        Command::Status(args) => status_command::run(args).await?.print(),
        Command::Workers(args) => workers_command::run(args).await?.print(),
        Command::Drain(args) => drain_command::drain(args).await?.print(),
        Command::Undrain(args) => drain_command::undrain(args).await?.print(),
        Command::Reload(args) => reload_command::run(args).await?.print(),
        Command::Explain(args) => print_line(explain_command::run(args).await?.trim_end()),
        Command::Health(args) => print_line(&health_command::run(args).await?),
        Command::Keys(args) => print_line(&keys_command::run(args)?),
        Command::Usage(args) => {
            print_line(&usage_command::run(&args).map_err(|why| Failure::new(exit::NO_INPUT, why))?)
        }
        Command::Schema { markdown } => match markdown {
            true => print_line(&splitrail_config::reference_markdown()),
            false => {
                let schema = schema_with_variables(splitrail_config::schema());
                print_line(&format!("{schema:#}"))
            }
        },
        Command::About(command) => command.run(&BUILD, describe::<Args>(&BUILD, variable)),
    }
}

/// With `logs`, each problem of the configuration becomes a log record.
async fn serve(args: ServeArgs, logs: bool) -> Result<(), Failure> {
    // What changes after this is noticed.
    let watched = args.config.clone().filter(|_| args.reload_on_change).map(WatchedFile::new);
    let loaded = args.load().map_err(|problems| Failure::of_problems(&problems, logs))?;
    warn_of(&loaded.warnings);
    for note in &loaded.notes {
        tracing::info!("{note}");
    }
    let listen = loaded.config.listen.clone();
    raise_descriptor_limit(loaded.config.limits.in_flight_max, "limits.in_flight_max");
    let stdout = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let core = splitrail_router::assemble::assemble(loaded.config, Some(stdout));
    let core = core.map_err(not_assembled)?;
    let running = Running::start_from(args.config, core, &listen).await?;
    // Signals are handled from the moment at which the router reports that it is ready.
    let signals = Signals::watch()?;
    let addresses = running.addresses;
    tracing::info!(version = BUILD.version, profile = BUILD.profile(), http = %addresses.http, grpc = addresses.grpc.map(tracing::field::display), admin = %addresses.admin, "serving");
    tell_ready(&format!("HTTP on {}, admin listener on {}", addresses.http, addresses.admin));
    if let Some(path) = args.ready_file {
        running.write_ready_file(&path).map_err(|error| Failure::unwritten(&error))?;
    }
    let lines = queue_log_lines(&running.core)?;
    until_stopped(running, signals, watched).await;
    lines.close();
    Ok(())
}

/// Lets log lines wait in a bounded queue from now on, so that a reader of stderr who does not keep
/// up delays no request.
fn queue_log_lines(core: &Core) -> std::io::Result<LineQueue> {
    let metrics = Arc::clone(&core.metrics);
    queue_lines(Box::new(move |lost| {
        metrics.log_lines_dropped.with_label_values::<&str>(&[]).inc_by(lost);
    }))
}

async fn run_quickstart(args: &QuickstartArgs) -> Result<(), Failure> {
    if args.peer_fetch && args.flow == splitrail_config::Flow::Aggregated {
        let message = "--peer-fetch needs a flow with a prefill leg, which `aggregated` has not";
        return Err(Failure::new(exit::USAGE, message));
    }
    let started = quickstart::start(args).await;
    let started = started.map_err(|error| match error {
        QuickstartError::Io(error) => error.into(),
        error => Failure::new(exit::UNAVAILABLE, error.to_string()),
    })?;
    let reason = wait_ready(&started.running.core, Duration::from_secs(30)).await;
    if let Some(reason) = reason {
        let message = format!("the quickstart did not become ready: {reason}");
        return Err(Failure::new(exit::UNAVAILABLE, message));
    }
    if args.print_config {
        print_line(&started.yaml)?;
    }
    let signals = Signals::watch()?.stopped_by_terminal();
    print_line(&started.hints())?;
    if let Some(path) = &args.ready_file {
        started.running.write_ready_file(path).map_err(|error| Failure::unwritten(&error))?;
    }
    let (running, _engines) = started.split();
    let lines = queue_log_lines(&running.core)?;
    until_stopped(running, signals, None).await;
    lines.close();
    Ok(())
}

/// If a resource that the configuration names cannot be used, the configuration is at fault; if a
/// file cannot be written, or the router has a defect, it is not.
fn not_assembled(error: AssembleError) -> Failure {
    let code = match error {
        AssembleError::Model(_) | AssembleError::Access(_) | AssembleError::Traces(_) => {
            exit::CONFIG
        }
        AssembleError::File(_) => exit::UNAVAILABLE,
        AssembleError::Defect(_) => exit::SOFTWARE,
    };
    Failure::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_defect_at_the_start_is_told_from_a_file_that_cannot_be_written() {
        let defect = not_assembled(AssembleError::Defect("two metrics have one name".to_owned()));
        assert_eq!(defect.code, exit::SOFTWARE);
        let file = not_assembled(AssembleError::File(std::io::ErrorKind::PermissionDenied.into()));
        assert_eq!(file.code, exit::UNAVAILABLE);
    }
}
