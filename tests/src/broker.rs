//! A NATS server as a process of its own, with JetStream in a folder that outlives it.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::ports::HeldPort;
use crate::process::Process;

/// A server that can be killed and started again with what it has stored.
pub struct NatsServer {
    folder: TempDir,
    args: Vec<String>,
    port: HeldPort,
    process: Option<Process>,
}

impl NatsServer {
    /// Starts a server with an empty store.
    pub async fn start() -> Self {
        Self::start_with("").await
    }

    /// Starts a server with an empty store; `more` stands in its configuration file.
    pub async fn start_with(more: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let port = HeldPort::take();
        let args = arguments(folder.path(), port.number(), more);
        let mut server = Self { folder, args, port, process: None };
        server.run().await;
        server
    }

    /// Starts a killed server again.
    pub async fn run(&mut self) {
        let (folder, address) = (self.folder.path(), self.port.address());
        let accepts = || greets(address);
        let started = Process::of(&nats_server(), "nats", folder, &self.args, &[], &accepts).await;
        self.process = Some(started);
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.process.take().expect("a running server").kill();
    }

    /// Removes all that the server has stored. The server must not run.
    pub fn lose_store(&self) {
        std::fs::remove_dir_all(self.folder.path().join("nats.store")).expect("a store");
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("nats://{}", self.port.address())
    }
}

/// Where the server is.
///
/// # Panics
/// If it is nowhere.
fn nats_server() -> PathBuf {
    if let Some(named) = std::env::var_os("NATS_SERVER") {
        return named.into();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/bin".into()]);
    let found = folders.map(|folder| folder.join("nats-server")).find(|file| file.is_file());
    found.expect(
        "nats-server is missing, which tests of shared limits need: `apt-get install \
         nats-server`, or name it in the variable NATS_SERVER",
    )
}

/// The arguments of a server that listens on loopback and keeps its streams in a folder.
fn arguments(folder: &Path, port: u16, more: &str) -> Vec<String> {
    let config = folder.join("nats.conf");
    let store = folder.join("nats.store");
    let text = format!(
        "host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: \"{}\" }}\n{more}\n",
        store.display()
    );
    std::fs::write(&config, text).expect("a configuration");
    vec!["-c".to_owned(), config.display().to_string()]
}

/// Whether a server says who it is, and has JetStream.
fn greets(at: SocketAddr) -> bool {
    let greeting = || {
        let mut stream = TcpStream::connect_timeout(&at, Duration::from_millis(200)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        let mut said = [0; 2048];
        let read = stream.read(&mut said).ok()?;
        Some(String::from_utf8_lossy(&said[..read]).into_owned())
    };
    greeting().is_some_and(|said| said.starts_with("INFO") && said.contains("\"jetstream\":true"))
}
