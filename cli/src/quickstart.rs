//! `splitrail quickstart`: a simulated P/D cluster and the router in front of it, in one process,
//! on loopback. The router is the real one, configured by a YAML file like any other; only the
//! engines are simulated.

use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use splitrail_config::{Flow, Problems, RequestFlow};
use splitrail_router::assemble::{AssembleError, assemble};
use splitrail_router::run::Running;
use splitrail_settings::variables::escaped;
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use tempfile::TempDir;

use crate::named_value::named;

/// The simulated model's name.
pub(crate) const MODEL: &str = "sim";

/// The options of a quickstart.
#[derive(Args)]
pub(crate) struct QuickstartArgs {
    /// Number of prefill engines.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=32))]
    prefill: u8,
    /// Number of decode engines.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=32))]
    decode: u8,
    /// Port of the OpenAI API; 0 for any free port.
    #[arg(long, default_value_t = 8000)]
    http_port: u16,
    /// Port of the gRPC API.
    #[arg(long, default_value_t = 8001)]
    grpc_port: u16,
    /// Port of the admin listener.
    #[arg(long, default_value_t = 9090)]
    admin_port: u16,
    /// The flow of requests.
    #[arg(long, default_value = "decode_first")]
    #[arg(value_parser = named::<Flow>(&["aggregated", "prefill_first", "decode_first", "auto"]))]
    pub(crate) flow: Flow,
    /// Switches on peer fetches and prewarming.
    #[arg(long)]
    pub(crate) peer_fetch: bool,
    /// A JSON file with addresses and models that is written once everything is bound.
    #[arg(long)]
    pub(crate) ready_file: Option<PathBuf>,
    /// Prints the router's configuration before it serves.
    #[arg(long)]
    pub(crate) print_config: bool,
}

impl QuickstartArgs {
    /// The error of a router that could not listen, with the flag that names another port.
    fn name_port_flag(&self, error: io::Error) -> io::Error {
        let flags = [
            ("--http-port", self.http_port),
            ("--grpc-port", self.grpc_port),
            ("--admin-port", self.admin_port),
        ];
        let message = error.to_string();
        let taken = |port: u16| message.contains(&format!("{}:", loopback(port)));
        match flags.into_iter().find(|(_, port)| taken(*port)) {
            Some((flag, _)) if error.kind() == io::ErrorKind::AddrInUse => {
                let hint = format!("name another port with {flag}, or 0 for any free port");
                io::Error::new(error.kind(), format!("{message}; {hint}"))
            }
            _ => error,
        }
    }
}

/// An address on loopback.
fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Why a quickstart did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuickstartError {
    /// A port or a file cannot be used.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The generated configuration is refused, which is a defect.
    #[error("{0}")]
    Config(#[from] Problems),
    /// The router could not be built.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
}

/// A running quickstart. Dropping it ends everything.
pub(crate) struct Quickstart {
    /// The router.
    pub(crate) running: Running,
    /// The configuration of the router, as a starting point for users.
    pub(crate) yaml: String,
    engines: Engines,
}

/// The engines of a quickstart, and the files of their model. Dropping it ends the engines.
pub(crate) struct Engines {
    _engines: Vec<SimEngine>,
    _files: TempDir,
}

/// Starts engines and router.
///
/// # Errors
/// A port is in use, or temporary files cannot be written.
pub(crate) async fn start(args: &QuickstartArgs) -> Result<Quickstart, QuickstartError> {
    let files = tempfile::Builder::new().prefix("splitrail-").tempdir()?;
    write_tokenizer(files.path())?;
    let roles = roles(args);
    let mut engines = Vec::with_capacity(roles.len());
    for (_, role) in &roles {
        engines.push(SimEngine::start(engine_config(*role)).await?);
    }
    let yaml = yaml(args, &roles, &engines, files.path());
    let loaded = splitrail_config::parse("quickstart.yaml", &yaml, files.path())?;
    let listen = loaded.config.listen.clone();
    let running = Running::start(assemble(loaded.config, None)?, &listen).await;
    let running = running.map_err(|error| args.name_port_flag(error))?;
    Ok(Quickstart { running, yaml, engines: Engines { _engines: engines, _files: files } })
}

/// Keys of a model whose workers fetch and are prewarmed. The simulated engines compute slowly and
/// transfer fast.
const PEER_FETCH: &str = "    peer_fetch: two_step
    peer_fetch_min_tokens: 32
    costs: { prefill_us_per_token: 200 }
    prewarm: { enabled: true }
";

/// Names and roles of the engines. Without hand-offs, all engines serve both legs.
fn roles(args: &QuickstartArgs) -> Vec<(String, Role)> {
    let prefill = (0..args.prefill).map(|i| (format!("p{i}"), Role::Prefill));
    let decode = (0..args.decode).map(|i| (format!("d{i}"), Role::Decode));
    match args.flow {
        Flow::PrefillFirst | Flow::DecodeFirst | Flow::Auto => prefill.chain(decode).collect(),
        Flow::Aggregated => {
            (0..args.prefill + args.decode).map(|i| (format!("w{i}"), Role::Both)).collect()
        }
    }
}

/// Speeds at which a person can observe prefill, hand-off and streaming.
fn engine_config(role: Role) -> SimConfig {
    SimConfig {
        model: MODEL.to_owned(),
        role,
        prefill_us_per_token: 200,
        decode_us_per_step: 15_000,
        transfer_us_per_block: 100,
        ..SimConfig::default()
    }
}

fn yaml(
    args: &QuickstartArgs,
    roles: &[(String, Role)],
    engines: &[SimEngine],
    tokenizer: &Path,
) -> String {
    let flow = RequestFlow::from(args.flow);
    let connector = if flow.hands_over() { "nixl" } else { "none" };
    let flow = flow.name();
    let mut workers = String::new();
    for ((id, role), engine) in roles.iter().zip(engines) {
        let role = match role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        };
        // Writing to a string cannot fail, and a simulated engine always publishes events.
        let _infallible = writeln!(
            workers,
            "      - {{ id: {id}, role: {role}, url: \"{}\", kv_events: \"{}\", kv_replay: \"{}\" }}",
            engine.url(),
            engine.kv_events_endpoint().unwrap_or_default(),
            engine.kv_replay_endpoint().unwrap_or_default(),
        );
    }
    let block_size = SimConfig::default().block_size;
    let peer_fetch = if args.peer_fetch { PEER_FETCH } else { "" };
    format!(
        "listen:
  http: {}
  http_hosts: [127.0.0.1, localhost]
  grpc: {}
  admin: {}
limits: {{ drain_delay: 200ms }}
models:
  - name: {MODEL}
    aliases: [default]
    block_size: {block_size}
    tokenizer: {{ kind: huggingface, path: {:?} }}
    flow: {flow}
    connector: {connector}
    local_prefill_max_tokens: {block_size}
{peer_fetch}    workers:
{workers}",
        loopback(args.http_port),
        loopback(args.grpc_port),
        loopback(args.admin_port),
        escaped(&tokenizer.display().to_string()),
    )
}

impl Quickstart {
    /// The router, and the engines, which must live as long as the router.
    pub(crate) fn split(self) -> (Running, Engines) {
        (self.running, self.engines)
    }

    /// Commands to try next.
    pub(crate) fn hints(&self) -> String {
        let addresses = self.running.addresses;
        let http = addresses.http;
        let grpc = addresses.grpc.map(|grpc| grpc.to_string()).unwrap_or_default();
        let admin = addresses.admin;
        let turn = "\"model\":\"sim\",\"stream\":true,\"max_tokens\":32,\
                    \"stream_options\":{\"include_usage\":true}";
        let first = "{\"role\":\"system\",\"content\":\"You are a patient librarian who \
                     knows where everything is.\"},{\"role\":\"user\",\"content\":\"Where are \
                     the maps?\"}";
        format!(
            "Splitrail is up, in front of simulated engines.
The text that they generate is random characters.

  live page    http://{admin}/
  OpenAI HTTP  http://{http}
  gRPC         {grpc}
  metrics      http://{admin}/metrics
  decisions    http://{admin}/admin/decisions?limit=1

Try a chat, streamed; then the same again, and look at cached_tokens in the last chunk:

  curl -iN http://{http}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{{turn},\"messages\":[{first}]}}'

The header x-splitrail-route names the workers. Why they were chosen, and the cluster live, in another terminal:

  splitrail explain --admin {admin} --request-id X-REQUEST-ID
  splitrail top --admin {admin}

Ctrl-C ends it."
        )
    }
}
