//! The `splitrail-shim` command.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::{Map, Value, json};
use splitrail_settings::Problems;
use splitrail_settings::logging::{self, LogFormat};
use splitrail_settings::process::{raise_descriptor_limit, write_whole};
use splitrail_shim::config::{self, Loaded};
use splitrail_shim::run::{Ended, Running, StartError};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit codes as of sysexits.h.
mod exit {
    pub(crate) const USAGE: u8 = 64;
    pub(crate) const NO_INPUT: u8 = 66;
    pub(crate) const SOFTWARE: u8 = 70;
    pub(crate) const OS_ERROR: u8 = 71;
    pub(crate) const IO_ERROR: u8 = 74;
    pub(crate) const CONFIG: u8 = 78;
}

/// The shim of one engine: tells routers what it holds, and gates for it.
#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Args {
    /// How log lines look; `RUST_LOG` filters them.
    #[arg(long, global = true, value_enum, default_value_t)]
    log_format: LogFormat,
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What to run: a file, or flags that are called as the file's keys.
#[derive(clap::Args)]
struct RunArgs {
    /// The configuration file; it has keys for everything, the flags below for the most common.
    #[arg(long, conflicts_with_all = [
        "engine", "listen", "advertise", "router", "role", "id", "model", "token_file",
    ])]
    config: Option<PathBuf>,
    /// The engine, `http://HOST:PORT`.
    #[arg(long)]
    engine: Option<String>,
    /// Where requests to the engine are served, `IP:PORT`.
    #[arg(long)]
    listen: Option<String>,
    /// Where routers reach that, `http://HOST:PORT`.
    #[arg(long)]
    advertise: Option<String>,
    /// Routers to attach to, `HOST:PORT` each.
    #[arg(long, value_delimiter = ',')]
    router: Vec<String>,
    /// What the engine is used for: prefill, decode or both.
    #[arg(long)]
    role: Option<String>,
    /// The worker's name.
    #[arg(long)]
    id: Option<String>,
    /// The model's name, if not the first that the engine lists.
    #[arg(long)]
    model: Option<String>,
    /// A file with what routers want to see; else the variable SPLITRAIL_FLEET_TOKEN.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Written once everything is bound and the engine was reached, as JSON.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
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

/// Exit code and message.
type Failure = (u8, String);

fn main() -> ExitCode {
    // One thread: what a shim does is passing on small pieces, and another thread costs more
    // in waking up than it takes off. Copies of everything are made on threads of their own.
    splitrail_shim::start_ticks();
    match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(command()),
        Err(error) => {
            say_error(&error.to_string());
            exit::OS_ERROR.into()
        }
    }
}

async fn command() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are answers, not mistakes; where they cannot be written,
            // the exit code has to do.
            let _unsaid = error.print();
            return if error.use_stderr() { exit::USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    logging::init(args.log_format, &[]);
    // Of what runs on, logs are all that anybody reads.
    let logs = args.command.is_none() && args.log_format == LogFormat::Json;
    let outcome = match args.command {
        Some(Command::Check { config }) => check(&config),
        Some(Command::Schema { markdown: true }) => say(&config::reference_markdown()),
        Some(Command::Schema { markdown: false }) => say(&format!("{:#}", config::schema())),
        None => run(args.run, logs).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, message)) => {
            match logs {
                true => tracing::error!(exit_code = code, "{message}"),
                false => say_error(&message),
            }
            ExitCode::from(code)
        }
    }
}

impl RunArgs {
    /// `logs` has mistakes of the file logged, a record each.
    fn load(&self, logs: bool) -> Result<Loaded, Failure> {
        if let Some(path) = &self.config {
            return config::load(path).map_err(|problems| {
                let (code, message) = not_loaded(&problems);
                if !logs {
                    return (code, message);
                }
                logging::report(problems.as_slice());
                (code, format!("the configuration has {} problem(s)", problems.count()))
            });
        }
        let mut keys = Map::new();
        for (key, value) in [
            ("engine", &self.engine),
            ("listen", &self.listen),
            ("advertise", &self.advertise),
            ("role", &self.role),
            ("id", &self.id),
            ("model", &self.model),
        ] {
            if let Some(value) = value {
                keys.insert(key.to_owned(), Value::String(value.clone()));
            }
        }
        keys.insert("router".to_owned(), json!(self.router));
        if let Some(path) = &self.token_file {
            keys.insert("token".to_owned(), json!({ "kind": "file", "path": path }));
        }
        config::from_arguments(keys).map_err(|problems| {
            let each = |problem: &splitrail_settings::Problem| {
                format!("{}\n  hint: {}", problem.message, problem.hint)
            };
            let lines: Vec<String> = problems.as_slice().iter().map(each).collect();
            (exit::USAGE, lines.join("\n"))
        })
    }
}

async fn run(args: RunArgs, logs: bool) -> Result<(), Failure> {
    let Loaded { config, warnings } = args.load(logs)?;
    logging::warn_of(&warnings);
    raise_descriptor_limit(config.limits.connections_max, "limits.connections_max");
    let id = config.id.clone();
    let mut signals = Signals::watch().map_err(os_error)?;
    let mut running = Running::start(config).await.map_err(|error| match error {
        StartError::Listen(_) => (exit::OS_ERROR, error.to_string()),
        StartError::Defect(_) => (exit::SOFTWARE, error.to_string()),
        error => (exit::CONFIG, error.to_string()),
    })?;
    let http = running.address();
    tracing::info!(%http, id, "serving; waiting for the engine");
    let serving = async {
        running.reached().await;
        if let Some(path) = &args.ready_file {
            let ready = json!({ "http": http.to_string(), "id": id });
            write_whole(path, &ready.to_string()).map_err(os_error)?;
        }
        Err::<(), Failure>(defect(running.ended().await))
    };
    tokio::select! {
        failed = serving => return failed,
        () = signals.next() => {}
    }
    tokio::select! {
        outcome = running.drain() => outcome.map_err(defect),
        () = signals.next() => {
            tracing::warn!("a second stop signal: ending at once");
            Ok(())
        }
    }
}

/// Stop signals.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn watch() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The next stop signal. SIGHUP, which asks for a reload, does not end the process.
    async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::warn!("SIGHUP: a shim does not reload; restart it, it keeps no state");
                }
            }
        }
    }
}

fn not_loaded(problems: &Problems) -> Failure {
    let code = if problems.is_unreadable() { exit::NO_INPUT } else { exit::CONFIG };
    (code, problems.to_string())
}

fn check(path: &Path) -> Result<(), Failure> {
    let loaded = config::load(path).map_err(|problems| not_loaded(&problems))?;
    for warning in &loaded.warnings {
        say(&format!("warning: {warning}"))?;
    }
    say(&format!("{}: ok", path.display()))
}

fn os_error(error: std::io::Error) -> Failure {
    (exit::OS_ERROR, error.to_string())
}

fn defect(ended: Ended) -> Failure {
    (exit::SOFTWARE, ended.to_string())
}

/// What a command was asked for goes to stdout; logs go to stderr. A reader that has seen
/// enough is no error.
fn say(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err((exit::IO_ERROR, format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn say_error(text: &str) {
    // Where even this cannot be written, the exit code has to do.
    let _unsaid = writeln!(std::io::stderr(), "{text}");
}
