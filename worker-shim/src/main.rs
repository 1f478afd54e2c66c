//! The `splitrail-shim` command.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::{Map, Value, json};
use splitrail_settings::command::{
    AboutCommand, Build, Failure, Paint, describe, exit, finish, parse, print_line, variable_name,
};
use splitrail_settings::logging::{self, LevelFilter, LogFormat};
use splitrail_settings::process::{raise_descriptor_limit, write_whole};
use splitrail_settings::service_manager::tell_ready;
use splitrail_settings::variables::schema_with_variables;
use splitrail_shim::config::{self, LoadedConfig};
use splitrail_shim::run::{RunningShim, StartError, UnexpectedExit};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The program. `release/README.md` says how it is optimised with an execution profile.
const BUILD: Build = Build {
    program: "splitrail-shim",
    version: env!("CARGO_PKG_VERSION"),
    commit: option_env!("SPLITRAIL_COMMIT"),
    features: &[],
    is_profile_guided: cfg!(profile_guided),
};

/// The variable of the environment for a flag.
fn variable(path: &[&str], flag: &str) -> String {
    let path = if flag == "config" { &[] } else { path };
    variable_name(&[&["SPLITRAIL", "SHIM"], path, &[flag]].concat())
}

/// The shim of one engine: reports the engine's KV blocks and load to routers, and checks the
/// cache hit threshold in front of the engine.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Args {
    /// The format of log lines: `text` or `json`. `RUST_LOG` sets the filter.
    #[arg(long, value_name = "FORMAT", global = true, value_enum, default_value_t)]
    #[arg(hide_possible_values = true)]
    log_format: LogFormat,
    #[command(flatten)]
    run: RunArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// The configuration: a file, or flags with the names of the file's keys.
#[derive(clap::Args)]
struct RunArgs {
    /// The configuration file. It has keys for all settings; the flags cover the most common ones.
    #[arg(long, conflicts_with_all = [
        "engine", "listen", "advertise", "router", "role", "id", "model", "token_file",
    ])]
    config: Option<PathBuf>,
    /// The engine's address, `http://HOST:PORT`.
    #[arg(long)]
    engine: Option<String>,
    /// The address at which the shim accepts requests for the engine, `IP:PORT`.
    #[arg(long)]
    listen: Option<String>,
    /// The address at which routers reach the shim, `http://HOST:PORT`.
    #[arg(long)]
    advertise: Option<String>,
    /// The routers to attach to, `HOST:PORT` each.
    #[arg(long, value_delimiter = ',')]
    router: Vec<String>,
    /// The role of the engine: prefill, decode or both.
    #[arg(long)]
    role: Option<String>,
    /// The worker's id, unique in its model.
    #[arg(long)]
    id: Option<String>,
    /// The model's name. Defaults to the first model that the engine lists.
    #[arg(long)]
    model: Option<String>,
    /// A file with the token for the routers. Defaults to the variable SPLITRAIL_FLEET_TOKEN.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// A JSON file that is written once the shim is bound and has reached the engine.
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
    #[command(flatten)]
    About(AboutCommand),
}

fn main() -> ExitCode {
    // One thread: a shim mostly forwards small chunks, and waking a second thread costs more than
    // the thread saves. Snapshots are taken on separate threads.
    splitrail_shim::start_ticks();
    match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(command()),
        Err(error) => finish(Err(error.into()), false),
    }
}

async fn command() -> ExitCode {
    let args: Args = match parse(&BUILD, variable) {
        Ok(args) => args,
        Err(code) => return code,
    };
    logging::init(args.log_format, LevelFilter::INFO, &[]);
    // While the shim runs with JSON logs, errors go to the log as well.
    let logs = args.command.is_none() && args.log_format == LogFormat::Json;
    let outcome = match args.command {
        Some(Command::Check { config }) => check(&config),
        Some(Command::Schema { markdown: true }) => print_line(&config::reference_markdown()),
        Some(Command::Schema { markdown: false }) => {
            print_line(&format!("{:#}", schema_with_variables(config::schema())))
        }
        Some(Command::About(command)) => command.run(&BUILD, describe::<Args>(&BUILD, variable)),
        None => run(args.run, logs).await,
    };
    finish(outcome, logs)
}

impl RunArgs {
    /// Loads the configuration. With `logs`, each problem of the file becomes a log record.
    fn load(&self, logs: bool) -> Result<LoadedConfig, Failure> {
        if let Some(path) = &self.config {
            return config::load(path).map_err(|problems| Failure::of_problems(&problems, logs));
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
            Failure::new(exit::USAGE, lines.join("\n"))
        })
    }
}

async fn run(args: RunArgs, logs: bool) -> Result<(), Failure> {
    let LoadedConfig { config, warnings } = args.load(logs)?;
    logging::warn_of(&warnings);
    raise_descriptor_limit(config.limits.connections_max, "limits.connections_max");
    let id = config.id.clone();
    let mut signals = Signals::watch()?;
    let mut running = RunningShim::start(config).await.map_err(|error| match error {
        StartError::Listen(_) => Failure::new(exit::OS_ERROR, error.to_string()),
        StartError::Defect(_) => Failure::new(exit::SOFTWARE, error.to_string()),
        error => Failure::new(exit::CONFIG, error.to_string()),
    })?;
    let http = running.address();
    tracing::info!(%http, id, "serving; waiting for the engine");
    // An engine may take longer to load its model than a service may take to start.
    tell_ready(&format!("worker {id} on {http}"));
    let serving = async {
        running.wait_for_engine().await;
        if let Some(path) = &args.ready_file {
            let ready = json!({ "http": http.to_string(), "id": id });
            write_whole(path, &ready.to_string()).map_err(|error| Failure::unwritten(&error))?;
        }
        Err::<(), Failure>(unexpected_exit_failure(running.unexpected_exit().await))
    };
    tokio::select! {
        failed = serving => return failed,
        () = signals.next() => {}
    }
    tokio::select! {
        outcome = running.drain() => outcome.map_err(unexpected_exit_failure),
        () = signals.next() => {
            tracing::warn!("a second stop signal: ending at once");
            Ok(())
        }
    }
}

/// The stop signals.
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

    /// Waits for the next stop signal. SIGHUP, which asks for a reload, does not end the process.
    async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::warn!("SIGHUP: a shim does not reload its configuration; restart it, it keeps no state");
                }
            }
        }
    }
}

fn check(path: &Path) -> Result<(), Failure> {
    let loaded = config::load(path).map_err(|problems| Failure::of_problems(&problems, false))?;
    let paint = Paint::of_stdout();
    for warning in &loaded.warnings {
        print_line(&format!("{} {}", paint.warning("warning:"), warning.painted(paint)))?;
    }
    print_line(&format!("{}: {}", path.display(), paint.good("ok")))
}

fn unexpected_exit_failure(ended: UnexpectedExit) -> Failure {
    Failure::new(exit::SOFTWARE, ended.to_string())
}
