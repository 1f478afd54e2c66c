//! Engines, shims and routers, each a process of its own that can be killed and started
//! again where it was.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use splitrail_kv::mix;
use splitrail_sim::write_tokenizer;
use tempfile::TempDir;

use crate::client::Client;
use crate::ports::HeldPorts;
use crate::process::Process;

/// How long the fleet may take to have a true picture again.
const RECOVERY: Duration = Duration::from_secs(45);

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessKind {
    /// A simulated engine.
    Engine,
    /// The shim of the engine of the same place.
    Shim,
    /// A router.
    Router,
}

/// A place where a process runs, now or later.
pub struct ManagedProcess {
    /// What runs there.
    pub kind: ProcessKind,
    /// Its name; that of the worker, for engines and shims.
    pub name: String,
    args: Vec<String>,
    process: Option<Process>,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    /// A router's admin listener.
    pub admin: SocketAddr,
}

/// A whole fleet on loopback.
pub struct ProcessCluster {
    /// Everything that runs.
    pub posts: Vec<ManagedProcess>,
    folder: TempDir,
    _ports: HeldPorts,
}

/// What to start.
pub struct Plan {
    /// Prefill engines, `p0`, ...
    pub prefill: usize,
    /// Decode engines, `d0`, ...
    pub decode: usize,
    /// Routers, `r0`, ...
    pub routers: usize,
    /// Further keys of the model, as YAML lines.
    pub model: String,
    /// Further top-level keys, as YAML lines.
    pub top: String,
    /// Further arguments of engines.
    pub engine: Vec<String>,
    /// Data-parallel ranks of each engine.
    pub ranks: u16,
    /// The addresses of routers that shims attach to, from the routers' own: where something
    /// stands between.
    pub between: fn(SocketAddr) -> SocketAddr,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            prefill: 2,
            decode: 2,
            routers: 2,
            model: String::new(),
            top: String::new(),
            engine: Vec::new(),
            ranks: 1,
            between: |address| address,
        }
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl ProcessCluster {
    /// Starts everything, and waits until every router serves every worker.
    pub async fn start(plan: Plan) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_tokenizer(folder.path()).expect("tokenizer files");
        let mut posts = Vec::new();
        let mut attach = Vec::new();
        let mut ports = HeldPorts::default();
        for place in 0..plan.routers {
            let [http, admin, fleet] = [(); 3].map(|()| ports.take());
            let name = format!("r{place}");
            let config = router_config(folder.path(), &name, &plan, [http, admin, fleet]);
            attach.push((plan.between)(loopback(fleet)).to_string());
            let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
            posts.push(ManagedProcess::new(ProcessKind::Router, &name, args.to_vec(), http, admin));
        }
        let roles = [("p", "prefill", plan.prefill), ("d", "decode", plan.decode)];
        for (letter, role, count) in roles {
            for place in 0..count {
                let name = format!("{letter}{place}");
                let [http, listen] = [(); 2].map(|()| ports.take());
                let [events, replay] = [(); 2].map(|()| ports.take_run(plan.ranks));
                let mut args: Vec<String> =
                    ["sim-engine", "--role", role].map(str::to_owned).into();
                for (flag, port) in [
                    ("--http-port", http),
                    ("--kv-events-port", events),
                    ("--kv-replay-port", replay),
                    ("--data-parallel", plan.ranks),
                ] {
                    args.extend([flag.to_owned(), port.to_string()]);
                }
                args.extend(plan.engine.clone());
                posts.push(ManagedProcess::new(ProcessKind::Engine, &name, args, http, 0));
                let engine = format!("http://{}", loopback(http));
                let (at, role) = (loopback(listen), role.to_owned());
                let args =
                    shim_flags([engine, at.to_string(), attach.join(","), role, name.clone()]);
                posts.push(ManagedProcess::new(ProcessKind::Shim, &name, args, listen, 0));
            }
        }
        let mut stand = Self { posts, folder, _ports: ports };
        // Engines first: a shim is ready once it has reached its own.
        for kind in [ProcessKind::Engine, ProcessKind::Router, ProcessKind::Shim] {
            for at in stand.of(kind) {
                stand.run(at).await;
            }
        }
        stand.true_picture("everything has started").await;
        stand
    }

    /// The places of a kind.
    pub fn of(&self, kind: ProcessKind) -> Vec<usize> {
        (0..self.posts.len()).filter(|at| self.posts[*at].kind == kind).collect()
    }

    /// The place of a process.
    pub fn place(&self, kind: ProcessKind, name: &str) -> usize {
        let found = self.posts.iter().position(|post| post.kind == kind && post.name == name);
        found.unwrap_or_else(|| panic!("no {kind:?} {name}"))
    }

    /// Starts what stands at a place.
    pub async fn run(&mut self, at: usize) {
        let folder = self.folder.path().to_owned();
        self.posts[at].run(&folder).await;
    }

    /// SIGKILL.
    pub fn kill(&mut self, at: usize) {
        self.posts[at].process.take().expect("a process").kill();
    }

    /// SIGTERM, and waits for the end, which must be a good one.
    pub async fn stop(&mut self, at: usize) {
        let post = &mut self.posts[at];
        let mut process = post.process.take().expect("a process");
        process.terminate();
        let status = process.ended().await;
        assert!(status.success(), "{}: {status}\n{}", post.name, process.log());
    }

    /// SIGSTOP.
    pub fn pause(&self, at: usize) {
        self.posts[at].process.as_ref().expect("a process").send("STOP");
    }

    /// SIGCONT.
    pub fn go_on(&self, at: usize) {
        self.posts[at].process.as_ref().expect("a process").send("CONT");
    }

    /// What a process has logged.
    pub fn log(&self, at: usize) -> String {
        self.posts[at].process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// Waits until every router's index holds of every worker exactly what its engine holds,
    /// and believes it, and nobody has anything to do.
    pub async fn true_picture(&self, after: &str) {
        let started = std::time::Instant::now();
        loop {
            let Some(untrue) = self.untrue().await else { return };
            if started.elapsed() > RECOVERY {
                let logs: Vec<_> = (0..self.posts.len())
                    .map(|at| format!("--- {}\n{}", self.posts[at].name, tail(&self.log(at))))
                    .collect();
                panic!("no true picture after {after}: {untrue}\n{}", logs.join("\n"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What is not as it should be, if something is not.
    async fn untrue(&self) -> Option<String> {
        for engine in self.of(ProcessKind::Engine) {
            let engine = &self.posts[engine];
            let state = get(engine.http, "/sim/state").await?;
            let busy = ["running", "waiting"].iter().any(|key| state[*key] != 0);
            if busy {
                return Some(format!("{} is busy: {state}", engine.name));
            }
            let sources = get(engine.http, "/kv_event_sources").await?;
            let mut ranks = Vec::new();
            for rank in 0..sources.as_object()?.len() {
                let held = get(engine.http, &format!("/sim/resident?rank={rank}")).await?;
                let names: BTreeSet<u64> =
                    held.as_array()?.iter().filter_map(Value::as_u64).collect();
                let digest = digest(names.iter().copied());
                ranks.push((names.len(), digest));
            }
            for router in self.of(ProcessKind::Router) {
                let router = &self.posts[router];
                let said = self.said_by(router, &engine.name, &ranks).await;
                if let Some(said) = said {
                    return Some(format!("{} of {}: {said}", router.name, engine.name));
                }
            }
        }
        None
    }

    /// How one router's picture of a worker differs: of each rank, how many blocks there are,
    /// and their digest.
    async fn said_by(
        &self,
        router: &ManagedProcess,
        worker: &str,
        held: &[(usize, u64)],
    ) -> Option<String> {
        let Some(all) = get(router.admin, "/admin/workers").await else {
            return Some("no answer".into());
        };
        let all = all["workers"].as_array().cloned().unwrap_or_default();
        let Some(seen) = all.iter().find(|seen| seen["id"] == worker) else {
            return Some("not there".into());
        };
        let good = seen["up"] == true
            && seen["events_current"] == true
            && seen["requests"] == 0
            && seen["prefill_tokens"] == 0;
        if !good {
            return Some(format!("{seen}"));
        }
        let index = get(router.admin, &format!("/admin/workers/{worker}/index")).await;
        let ranks = index.and_then(|index| index["ranks"].as_array().cloned()).unwrap_or_default();
        let expected: Vec<_> = (0usize..)
            .zip(held)
            .filter(|(_, (names, _))| *names > 0)
            .map(|(rank, (names, digest))| json!([rank, names, format!("{digest:016x}")]))
            .collect();
        let said = |rank: &Value| json!([rank["rank"], rank["names"], rank["digest"]]);
        let is = ranks.iter().map(said).eq(expected.iter().cloned());
        (!is).then(|| format!("{ranks:?}, where the engine has {expected:?}"))
    }
}

impl ManagedProcess {
    fn new(kind: ProcessKind, name: &str, args: Vec<String>, http: u16, admin: u16) -> Self {
        let (http, admin) = (loopback(http), loopback(admin));
        Self { kind, name: name.to_owned(), args, process: None, http, admin }
    }

    /// The process that runs there.
    ///
    /// # Panics
    /// If none does.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("a running process").pid()
    }

    async fn run(&mut self, folder: &Path) {
        let log = format!("{}-{:?}", self.name, self.kind);
        let process = match self.kind {
            ProcessKind::Shim => Process::shim(&log, folder, &self.args).await,
            ProcessKind::Engine | ProcessKind::Router => {
                Process::start(&log, folder, &self.args).await
            }
        };
        self.process = Some(process);
    }
}

/// The flags of a shim that attaches to routers.
fn shim_flags(values: [String; 5]) -> Vec<String> {
    let flags = ["--engine", "--listen", "--router", "--role", "--id"];
    flags.into_iter().zip(values).flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
}

fn router_config(folder: &Path, name: &str, plan: &Plan, ports: [u16; 3]) -> PathBuf {
    let [http, admin, fleet] = ports.map(loopback);
    let (model, top) = (indented(&plan.model), &plan.top);
    let yaml = format!(
        "listen: {{ http: \"{http}\", admin: \"{admin}\", fleet: \"{fleet}\" }}
limits: {{ drain_delay: 3s, drain_grace: 20s }}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: decode_first
    connector: nixl
    policy: {{ kind: kv_overlap }}
    discovery: [ {{ kind: shim }} ]
{model}"
    );
    let path = folder.join(format!("{name}.yaml"));
    std::fs::write(&path, yaml).expect("a configuration");
    path
}

fn indented(lines: &str) -> String {
    lines.lines().map(|line| format!("    {line}\n")).collect()
}

async fn get(address: SocketAddr, path: &str) -> Option<Value> {
    let client = Client::new(address);
    let reply = client.try_get(path).await.ok()?;
    serde_json::from_slice(&reply.body).ok()
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// The digest of blocks' names, as `/admin/workers/{id}/index` computes it.
pub fn digest(names: impl IntoIterator<Item = u64>) -> u64 {
    names.into_iter().fold(0, |sum, name| sum.wrapping_add(mix(name)))
}
