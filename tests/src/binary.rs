//! The `splitrail` binary as a process of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::cluster::eventually;

/// A router process. Dropping it kills it.
pub struct RouterProcess {
    child: Child,
    /// The front door.
    pub http: SocketAddr,
    /// The gRPC listener.
    pub grpc: SocketAddr,
    /// The admin listener.
    pub admin: SocketAddr,
    /// The fleet listener, where there is one.
    pub fleet: Option<SocketAddr>,
    /// The listener for metrics, where there is one.
    pub metrics: Option<SocketAddr>,
}

impl RouterProcess {
    /// Runs `splitrail serve` with a configuration whose listeners take any port.
    /// Its standard error goes to `log`; `folder` gets its files.
    pub async fn serve(folder: &Path, yaml: &str, env: &[(&str, &str)], log: &Path) -> Self {
        let (config, ready) = (folder.join("splitrail.yaml"), folder.join("ready.json"));
        std::fs::write(&config, yaml).expect("a configuration file");
        let stderr = std::fs::File::create(log).expect("a log file");
        let mut child = Command::new(built("splitrail"))
            .args(["serve", "--config"])
            .arg(&config)
            .arg("--ready-file")
            .arg(&ready)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("a router process");
        eventually("the router process is ready", async || {
            if let Ok(Some(status)) = child.try_wait() {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                panic!("the router process ended with {status}: {said}");
            }
            ready.exists()
        })
        .await;
        let ready = std::fs::read(&ready).expect("a ready file");
        let ready: Value = serde_json::from_slice(&ready).expect("JSON");
        let address = |key: &str| {
            let text = ready[key].as_str().unwrap_or_else(|| panic!("no {key}"));
            text.parse().expect("an address")
        };
        let fleet = ready["fleet"].as_str().map(|_| address("fleet"));
        let metrics = ready["metrics"].as_str().map(|_| address("metrics"));
        let (http, grpc, admin) = (address("http"), address("grpc"), address("admin"));
        Self { child, http, grpc, admin, fleet, metrics }
    }

    /// The process's id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, named as `kill` names it.
    pub fn signal(&self, name: &str) {
        crate::proc::signal(self.pid(), name);
    }

    /// Whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("its state").is_some()
    }

    /// Ends the process and waits until it is gone: its log is complete.
    pub fn end(self) {}
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        // It may have ended by itself already.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A binary of the same build as the running test. A test of another package does not have
/// cargo build it, but a run of the whole workspace does.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's path");
    // target/PROFILE/deps/TEST-HASH
    let folder = test.ancestors().nth(2).expect("the profile's folder");
    let binary = folder.join(name);
    assert!(
        binary.is_file(),
        "{} is missing: `cargo test` in the root folder builds it, and so does \
         `cargo build --bin {name}`",
        binary.display()
    );
    binary
}
