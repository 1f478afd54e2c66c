//! The compared targets in front of the engines: none, this router in several configurations, and
//! its peers (`peers`). All of them are processes with two threads for requests.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use splitrail_sim::SimEngine;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

use super::engines::{Engines, Fleet};
use super::tls::Certificate;
use super::{Failure, MODEL};
use crate::fleet::http;
use crate::fleet::process::{Process, free_ports};

/// How long a program may take until it serves.
const PATIENCE: Duration = Duration::from_secs(60);

/// Something that answers requests.
pub(super) struct Target {
    /// As rows and plots name it.
    pub(super) name: &'static str,
    /// Where requests go that are answered at once.
    pub(super) whole: SocketAddr,
    /// Where requests for streams go.
    pub(super) streams: SocketAddr,
    /// Where its metrics are, if it is this router.
    pub(super) admin: Option<SocketAddr>,
    /// Where gRPC calls go, if it has a door for them.
    pub(super) grpc: Option<SocketAddr>,
    /// Its process, unless it is the engine itself.
    pub(super) process: Option<Process>,
    /// Whether it tells where it prefilled, and that can be wrong.
    pub(super) checks: bool,
    /// How clients begin a session of TLS; `None` for plain connections.
    pub(super) tls: Option<TlsConnector>,
}

impl Target {
    /// The engine itself.
    pub(super) fn direct(engines: &Engines) -> Self {
        let address = engines.aggregated[0].address;
        let (whole, streams) = (address, address);
        let (admin, grpc, process, tls) = (None, None, None, None);
        Self { name: "direct", whole, streams, admin, grpc, process, checks: false, tls }
    }

    /// Whether it is this router.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self.name, "round_robin" | "pd" | "kv_aware")
    }

    /// What another build is called that is measured beside it.
    pub(super) fn beside(name: &str) -> &'static str {
        match name {
            "round_robin" => "rr beside",
            "pd" => "pd beside",
            "tls" => "tls beside",
            _ => "kv beside",
        }
    }

    /// Whether one engine does all of a request.
    pub(super) fn is_plain(&self) -> bool {
        !matches!(self.name, "pd" | "kv_aware" | "vllm-router pd" | "pd beside" | "kv beside")
    }

    /// This router.
    ///
    /// # Errors
    /// If it does not become ready.
    pub(super) async fn ours(
        name: &'static str,
        kind: Kind<'_>,
        (program, log): (&Path, &str),
        folder: &Path,
    ) -> Result<Self, Failure> {
        Self::ours_in(name, kind.into(), program, folder, &[("RUST_LOG", log)]).await
    }

    /// This router with other settings, or in another environment.
    ///
    /// # Errors
    /// If it does not become ready.
    pub(super) async fn ours_in(
        name: &'static str,
        settings: Settings<'_>,
        program: &Path,
        folder: &Path,
        variables: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        let [whole, grpc, admin] = free_ports()?;
        let path = folder.join(format!("{name}.yaml"));
        let checks = matches!(settings.kind, Kind::KvAware(_));
        let tls = settings.certificate.map(Certificate::connector).transpose()?;
        fs::write(&path, yaml(settings, [whole, grpc, admin]))?;
        let args = ["serve", "--config", &path.to_string_lossy()];
        let process = Process::start_in(program, name, folder, &args, variables)?;
        let process = Some(up(process, folder, admin, "/ready").await?);
        let (admin, grpc) = (Some(admin), Some(grpc));
        Ok(Self { name, whole, streams: whole, admin, grpc, process, checks, tls })
    }
}

/// nginx's workers outlive a master that is killed.
impl Drop for Target {
    fn drop(&mut self) {
        let family = self.process.as_ref().and_then(|process| process.ids().ok());
        // Alone, it may have something to write as it ends.
        let family = family.filter(|family| family.len() > 1);
        for id in family.into_iter().flatten().filter_map(|id| i32::try_from(id).ok()) {
            if let Some(id) = Pid::from_raw(id) {
                // It may have ended by itself.
                let _gone = kill_process(id, Signal::KILL);
            }
        }
    }
}

/// Waits until a process answers.
pub(super) async fn up(
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
        if started.elapsed() > PATIENCE {
            return Err(format!("{address}{path} does not answer with 200").into());
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// The ways in which this router is measured.
#[derive(Clone, Copy)]
pub(super) enum Kind<'a> {
    /// One engine does it all; each in turn.
    Aggregated(&'a Engines),
    /// Prefill here, decode there; each in turn.
    Pd(&'a Engines),
    /// The same, where most of the prompt is.
    KvAware(&'a Fleet),
    /// Prefill on the first simulated engine, decode on the second one.
    Simulated(&'a [SimEngine; 2]),
}

/// How a router is configured.
#[derive(Clone, Copy)]
pub(super) struct Settings<'a> {
    /// How requests are served.
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
        Kind::KvAware(fleet) => {
            let tokenizer = format!("huggingface, path: \"{}\"", fleet.tokenizer.display());
            // So little weight on load that the right worker is always the one that holds most.
            (PREFILL_FIRST, "kv_overlap, overlap_weight: 1, load_weight: 0.001", tokenizer)
        }
    };
    let mut out = format!(
        "listen: {{ http: {http}, grpc: \"{grpc}\", admin: \"{admin}\" }}
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
        Kind::KvAware(fleet) => {
            for (id, role, mock, feed) in &fleet.members {
                let [events, replay] = &feed.endpoints;
                let events = format!(", kv_events: \"{events}\", kv_replay: \"{replay}\"");
                worker(id, role, mock.address, &events);
            }
        }
    }
    out
}
