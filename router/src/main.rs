//! The `splitrail` command.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use splitrail::config;
use splitrail::run::{Running, until_stopped};
use splitrail::telemetry::logging::{self, LogFormat};

/// Exit codes as of sysexits.h.
mod exit {
    pub(crate) const UNAVAILABLE: u8 = 69;
    pub(crate) const OS_ERROR: u8 = 71;
    pub(crate) const CONFIG: u8 = 78;
}

/// A front door for LLM clusters with disaggregated prefill and decode.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// How log lines look; `RUST_LOG` filters them.
    #[arg(long, global = true, value_enum, default_value_t)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the router.
    Serve {
        /// The configuration file.
        #[arg(long)]
        config: PathBuf,
        /// Written once everything is bound: addresses and models, as JSON.
        #[arg(long)]
        ready_file: Option<PathBuf>,
    },
    /// Checks a configuration and prints every problem with its place.
    Check {
        /// The configuration file.
        #[arg(long)]
        config: PathBuf,
    },
    /// Prints the JSON Schema of the configuration, for editors.
    Schema {
        /// Prints the reference as Markdown instead.
        #[arg(long)]
        markdown: bool,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    logging::init(args.log_format);
    match run(args.command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, message)) => {
            say_error(&message);
            ExitCode::from(code)
        }
    }
}

async fn run(command: Command) -> Result<(), (u8, String)> {
    match command {
        Command::Serve { config, ready_file } => serve(config, ready_file).await,
        Command::Check { config } => check(&config),
        Command::Schema { markdown } => {
            if markdown {
                say(&config::reference_markdown());
            } else {
                say(&format!("{:#}", config::schema()));
            }
            Ok(())
        }
    }
}

async fn serve(path: PathBuf, ready_file: Option<PathBuf>) -> Result<(), (u8, String)> {
    let loaded = config::load(&path).map_err(|problems| (exit::CONFIG, problems.to_string()))?;
    for warning in &loaded.warnings {
        tracing::warn!(%warning, "configuration");
    }
    let listen = loaded.config.listen.clone();
    let core = splitrail::assemble::assemble(loaded.config).await;
    let core = core.map_err(|error| (exit::UNAVAILABLE, error.to_string()))?;
    let os_error = |error: std::io::Error| (exit::OS_ERROR, error.to_string());
    let running = Running::start(core, &listen).await.map_err(os_error)?;
    let addresses = running.addresses();
    tracing::info!(http = %addresses.http, grpc = ?addresses.grpc, admin = %addresses.admin, "serving");
    if let Some(path) = ready_file {
        running.write_ready_file(&path).map_err(os_error)?;
    }
    until_stopped(running).await.map_err(os_error)
}

fn check(path: &std::path::Path) -> Result<(), (u8, String)> {
    let loaded = config::load(path).map_err(|problems| (exit::CONFIG, problems.to_string()))?;
    for warning in &loaded.warnings {
        say(&format!("warning: {warning}"));
    }
    say(&format!("{}: ok", path.display()));
    Ok(())
}

/// What a command was asked for goes to stdout; logs go to stderr.
#[allow(clippy::print_stdout)]
fn say(text: &str) {
    println!("{text}");
}

#[allow(clippy::print_stderr)]
fn say_error(text: &str) {
    eprintln!("{text}");
}
