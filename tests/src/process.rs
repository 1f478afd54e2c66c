//! The built binary as real processes: engines and a router that can be killed.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use splitrail_sim::write_tokenizer;
use tempfile::TempDir;

use crate::binary::built;
use crate::client::Client;
use crate::cluster::eventually;
use crate::ports::HeldPorts;

/// A child process. Dropping it, also in a panic, kills it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    output: PathBuf,
    ready: Value,
}

impl Process {
    /// Starts `splitrail ARGS --ready-file FILE` and waits until the file is there.
    pub async fn start(name: &str, folder: &Path, args: &[String]) -> Self {
        Self::run(&built("splitrail"), name, folder, args, &[]).await
    }

    /// Starts a shim, `splitrail-shim ARGS --ready-file FILE`, and waits likewise.
    pub async fn shim(name: &str, folder: &Path, args: &[String]) -> Self {
        Self::run(&built("splitrail-shim"), name, folder, args, &[]).await
    }

    /// The same, with these variables in its environment.
    pub async fn shim_with(
        name: &str,
        folder: &Path,
        args: &[String],
        env: &[(&str, &str)],
    ) -> Self {
        Self::run(&built("splitrail-shim"), name, folder, args, env).await
    }

    /// The same with a program at another place, for example of another release.
    pub async fn run(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[String],
        env: &[(&str, &str)],
    ) -> Self {
        let ready_file = folder.join(format!("{name}.ready.json"));
        // Of an earlier process of this name.
        let _absent = std::fs::remove_file(&ready_file);
        let mut args = args.to_vec();
        args.extend(["--ready-file".to_owned(), ready_file.display().to_string()]);
        let mut process =
            Self::of(program, name, folder, &args, env, &|| ready_file.is_file()).await;
        let ready = std::fs::read(&ready_file).expect("a ready file");
        process.ready = serde_json::from_slice(&ready).expect("JSON");
        process
    }

    /// Starts any program, and waits until it is ready.
    pub async fn of(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[String],
        env: &[(&str, &str)],
        is_ready: &(dyn Fn() -> bool + Sync),
    ) -> Self {
        let [log, output] = ["log", "out"].map(|end| folder.join(format!("{name}.{end}")));
        let child = Command::new(program)
            .args(args)
            .env("RUST_LOG", "info")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(File::create(&output).expect("an output file"))
            .stderr(File::create(&log).expect("a log file"))
            .spawn()
            .expect("a process");
        let mut process = Self { name: name.to_owned(), child, log, output, ready: Value::Null };
        eventually(&format!("{name} is ready"), async || {
            if let Some(status) = process.child.try_wait().expect("a status") {
                panic!("{} ended: {status}\n{}", process.name, process.log());
            }
            is_ready()
        })
        .await;
        process
    }

    /// An entry of its ready file.
    pub fn told(&self, key: &str) -> &str {
        let entry = self.ready[key].as_str();
        entry.unwrap_or_else(|| panic!("no {key} in {}", self.ready))
    }

    /// A client of an address in its ready file.
    pub fn client(&self, key: &str) -> Client {
        let address: SocketAddr = self.told(key).parse().expect("an address");
        Client::new(address)
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it wrote to its standard output.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.child.kill().expect("a process to kill");
        self.child.wait().expect("its end");
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.send("TERM");
    }

    /// SIGHUP.
    pub fn hang_up(&self) {
        self.send("HUP");
    }

    pub(crate) fn send(&self, signal: &str) {
        crate::proc::signal(self.pid(), signal);
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("a status").is_none()
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        let what = format!("{} ends", self.name);
        eventually(&what, async || {
            status = self.child.try_wait().expect("a status");
            status.is_some()
        })
        .await;
        status.expect("a status")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(30).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            let mut stderr = std::io::stderr();
            let text = format!("--- {} ---\n{}\n", self.name, tail.join("\n"));
            let _unseen = std::io::Write::write_all(&mut stderr, text.as_bytes());
        }
    }
}

/// Engines and a router, each a process of its own.
pub struct Processes {
    /// The engines, in the order in which they were named.
    pub engines: Vec<Process>,
    /// The router.
    pub router: Process,
    /// A client of the front door.
    pub http: Client,
    /// A client of the admin listener.
    pub admin: Client,
    files: TempDir,
    settings: Vec<Vec<String>>,
    _ports: HeldPorts,
}

impl Processes {
    /// Starts engines by name (`p0` prefills, `d0` decodes) with further arguments,
    /// and a P/D router with these `limits` (a YAML flow mapping).
    pub async fn start(engines: &[&str], settings: fn(&str) -> Vec<String>, limits: &str) -> Self {
        let files = tempfile::tempdir().expect("a temporary folder");
        write_tokenizer(files.path()).expect("tokenizer files");
        let mut running = Vec::new();
        let mut all_settings = Vec::new();
        let mut workers = String::new();
        let mut ports = HeldPorts::default();
        for name in engines {
            let role = match name.chars().next() {
                Some('p') => "prefill",
                _ => "decode",
            };
            let mut args = vec!["sim-engine".to_owned(), "--role".into(), role.into()];
            for flag in ["--http-port", "--kv-events-port", "--kv-replay-port"] {
                args.extend([flag.to_owned(), ports.take().to_string()]);
            }
            args.extend(settings(name));
            let engine = Process::start(name, files.path(), &args).await;
            workers += &format!(
                "      - {{ id: {name}, role: {role}, url: \"http://{}\", kv_events: \"{}\", \
                 kv_replay: \"{}\" }}\n",
                engine.told("http"),
                engine.told("kv_events"),
                engine.told("kv_replay"),
            );
            running.push(engine);
            all_settings.push(args);
        }
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {limits}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: prefill_first
    connector: nixl
    policy: {{ kind: kv_overlap }}
    canary: {{ enabled: false }}
    workers:
{workers}"
        );
        let config = files.path().join("splitrail.yaml");
        std::fs::write(&config, yaml).expect("a configuration");
        let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
        let router = Process::start("router", files.path(), &args).await;
        let processes = Self {
            engines: running,
            http: router.client("http"),
            admin: router.client("admin"),
            router,
            files,
            settings: all_settings,
            _ports: ports,
        };
        eventually("the router is ready", async || {
            processes.http.get("/ready").await.status == 200
        })
        .await;
        processes
    }

    /// Starts a killed engine again where it was: another process, the same ports.
    pub async fn restart(&mut self, place: usize) {
        let name = self.engines[place].name.clone();
        self.engines[place] = Process::start(&name, self.files.path(), &self.settings[place]).await;
    }

    /// Waits until an engine has as many running requests as a condition wants.
    pub async fn until_running(&self, place: usize, wanted: impl Fn(u64) -> bool) {
        let engine = &self.engines[place];
        let client = engine.client("http");
        eventually(&format!("{} has the work expected", engine.name), async || {
            let state = client.get("/sim/state").await.json();
            wanted(state["running"].as_u64().expect("a count"))
        })
        .await;
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        crate::cluster::metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }
}
