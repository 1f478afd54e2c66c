//! The targets that are compared: an engine itself, this router in several configurations, and its
//! peers (`peers`). Routers and peers are processes with two threads for requests.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use splitrail_sim::SimEngine;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

use super::engines::{Engines, KvEngines};
use super::tls::Certificate;
use super::{Failure, MODEL};
use crate::fleet::http;
use crate::fleet::process::{Process, free_ports};

/// Maximum time until a program is ready.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A program that answers requests.
pub(super) struct Target {
    /// The name in rows and plots.
    pub(super) name: &'static str,
    /// The address for requests with whole replies.
    pub(super) whole: SocketAddr,
    /// The address for requests with streamed replies.
    pub(super) streams: SocketAddr,
    /// The admin listener, if the target is this router.
    pub(super) admin: Option<SocketAddr>,
    /// The address for gRPC calls, if the target has one.
    pub(super) grpc: Option<SocketAddr>,
    /// The process of the target; `None` if the target is an engine.
    pub(super) process: Option<Process>,
    /// Whether clients compare the prefill worker in the route header with the expected one.
    pub(super) checks_worker: bool,
    /// Opens TLS sessions of clients; `None` for plain connections.
    pub(super) tls: Option<TlsConnector>,
}

impl Target {
    /// An engine itself, without a program in front of it.
    pub(super) fn direct(engines: &Engines) -> Self {
        let address = engines.aggregated[0].address;
        let (whole, streams) = (address, address);
        let (admin, grpc, process, tls) = (None, None, None, None);
        Self { name: "direct", whole, streams, admin, grpc, process, checks_worker: false, tls }
    }

    /// Whether the target is this router, in one of its usual configurations.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self.name, "round_robin" | "pd" | "kv_aware")
    }

    /// The name of the target with the other build of the router (`--beside`).
    pub(super) fn beside_name(name: &str) -> &'static str {
        match name {
            "round_robin" => "rr beside",
            "pd" => "pd beside",
            "tls" => "tls beside",
            _ => "kv beside",
        }
    }

    /// Whether one engine serves each request alone.
    pub(super) fn is_plain(&self) -> bool {
        !matches!(self.name, "pd" | "kv_aware" | "vllm-router pd" | "pd beside" | "kv beside")
    }

    /// Starts this router with the given `RUST_LOG`.
    ///
    /// # Errors
    /// The router cannot be started or does not become ready.
    pub(super) async fn ours(
        name: &'static str,
        kind: Kind<'_>,
        (program, log): (&Path, &str),
        folder: &Path,
    ) -> Result<Self, Failure> {
        Self::ours_in(name, kind.into(), program, folder, &[("RUST_LOG", log)]).await
    }

    /// Starts this router with settings and environment variables.
    ///
    /// # Errors
    /// The router cannot be started or does not become ready.
    pub(super) async fn ours_in(
        name: &'static str,
        settings: Settings<'_>,
        program: &Path,
        folder: &Path,
        variables: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        let [whole, grpc, admin] = free_ports()?;
        let path = folder.join(format!("{name}.yaml"));
        let checks_worker = matches!(settings.kind, Kind::KvAware(_));
        let tls = settings.certificate.map(Certificate::connector).transpose()?;
        fs::write(&path, yaml(settings, [whole, grpc, admin]))?;
        let args = ["serve", "--config", &path.to_string_lossy()];
        let process = Process::start_in(program, name, folder, &args, variables)?;
        let process = Some(wait_until_ok(process, folder, admin, "/ready").await?);
        let (admin, grpc) = (Some(admin), Some(grpc));
        Ok(Self { name, whole, streams: whole, admin, grpc, process, checks_worker, tls })
    }
}

/// Kills the child processes too, because nginx's workers outlive a killed master.
impl Drop for Target {
    fn drop(&mut self) {
        let ids = self.process.as_ref().and_then(|process| process.ids().ok());
        // A process without children is left to `Process`, which lets it write its execution
        // profile.
        let ids = ids.filter(|ids| ids.len() > 1);
        for id in ids.into_iter().flatten().filter_map(|id| i32::try_from(id).ok()) {
            if let Some(id) = Pid::from_raw(id) {
                // The process may have ended by itself.
                let _ended = kill_process(id, Signal::KILL);
            }
        }
    }
}

/// Waits until a path of a process is answered with status 200.
///
/// # Errors
/// The process ends, or is not ready in time.
pub(super) async fn wait_until_ok(
    mut process: Process,
    folder: &Path,
    address: SocketAddr,
    path: &str,
) -> Result<Process, Failure> {
    let started = Instant::now();
    loop {
        process.check(folder)?;
        if let Ok((200, _)) = http::request(address, "GET", path, "").await {
            return Ok(process);
        }
        if started.elapsed() > START_TIMEOUT {
            return Err(format!("{address}{path} is not answered with 200 in time").into());
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// How a router serves requests, and with which engines.
#[derive(Clone, Copy)]
pub(super) enum Kind<'a> {
    /// With one engine per request, in turn.
    Aggregated(&'a Engines),
    /// With a prefill and a decode engine per request, each in turn.
    Pd(&'a Engines),
    /// With the prefill engine that holds most of the prompt, and a decode engine.
    KvAware(&'a KvEngines),
    /// With the first simulated engine for prefills and the second one for decoding.
    Simulated(&'a [SimEngine; 2]),
}

/// The configuration of a router.
#[derive(Clone, Copy)]
pub(super) struct Settings<'a> {
    /// How the router serves requests.
    pub(super) kind: Kind<'a>,
    /// Further members of the configuration, as lines of YAML.
    pub(super) further: &'a str,
    /// The certificate of the HTTP listener; `None` for plain connections.
    pub(super) certificate: Option<&'a Certificate>,
}

impl<'a> From<Kind<'a>> for Settings<'a> {
    fn from(kind: Kind<'a>) -> Self {
        Self { kind, further: "", certificate: None }
    }
}

const PREFILL_FIRST: &str = "flow: prefill_first\n    connector: nixl";

fn yaml(settings: Settings<'_>, [http, grpc, admin]: [SocketAddr; 3]) -> String {
    let Settings { kind, further, certificate } = settings;
    let http = match certificate {
        None => format!("\"{http}\""),
        Some(Certificate { chain, key, .. }) => {
            format!("{{ address: \"{http}\", tls: {{ cert: {chain:?}, key: {key:?} }} }}")
        }
    };
    let (flow, policy, tokenizer) = match &kind {
        Kind::Aggregated(_) => ("flow: aggregated", "round_robin", "none".to_owned()),
        Kind::Pd(_) | Kind::Simulated(_) => (PREFILL_FIRST, "round_robin", "none".to_owned()),
        Kind::KvAware(engines) => {
            let tokenizer = format!("huggingface, path: \"{}\"", engines.tokenizer.display());
            // Load has so little weight that the best worker is always the one that holds most.
            (PREFILL_FIRST, "kv_overlap, overlap_weight: 1, load_weight: 0.001", tokenizer)
        }
    };
    let access_log = match further.contains("access_log:") {
        true => "",
        false => "access_log: { enabled: false }\n",
    };
    let mut out = format!(
        "{access_log}listen: {{ http: {http}, grpc: \"{grpc}\", admin: \"{admin}\" }}
limits: {{ connections_max: 20000, in_flight_max: 20000 }}
{further}models:
  - name: {MODEL}
    block_size: {}
    tokenizer: {{ kind: {tokenizer} }}
    {flow}
    policy: {{ kind: {policy} }}
    canary: {{ enabled: false }}
    workers:
",
        super::BLOCK_SIZE
    );
    let mut worker = |id: &str, role: &str, address: SocketAddr, events: &str| {
        // Writing to a string cannot fail.
        let _infallible = writeln!(
            out,
            "      - {{ id: {id}, role: {role}, url: \"http://{address}\"{events} }}"
        );
    };
    match kind {
        Kind::Aggregated(engines) => {
            for (at, mock) in engines.aggregated.iter().enumerate() {
                worker(&format!("w{at}"), "both", mock.address, "");
            }
        }
        Kind::Pd(engines) => {
            for (role, short, mocks) in
                [("prefill", 'p', &engines.prefill), ("decode", 'd', &engines.decode)]
            {
                for (at, mock) in mocks.iter().enumerate() {
                    worker(&format!("{short}{at}"), role, mock.address, "");
                }
            }
        }
        Kind::Simulated([prefill, decode]) => {
            worker("p0", "prefill", prefill.http_addr(), "");
            worker("d0", "decode", decode.http_addr(), "");
        }
        Kind::KvAware(engines) => {
            for (id, role, mock, events) in &engines.members {
                let [events, replay] = &events.endpoints;
                let events = format!(", kv_events: \"{events}\", kv_replay: \"{replay}\"");
                worker(id, role, mock.address, &events);
            }
        }
    }
    out
}
