//! A broker for the event plane: a `nats-server` process, if that program is installed.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::Failure;
use super::process::Process;

/// Maximum time until the broker accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The path of `nats-server`: the variable `NATS_SERVER`, or the first hit in `PATH` and in two
/// more folders. `None` if the program is not installed.
pub(super) fn nats_server() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NATS_SERVER") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/bin".into()]);
    folders.map(|folder| folder.join("nats-server")).find(|file| file.is_file())
}

/// Starts `nats-server` with JetStream, with its files in `folder`, and waits until it accepts
/// connections.
///
/// # Errors
/// The process cannot be started, ends, or does not accept connections in time.
pub(super) async fn start(
    program: &Path,
    folder: &Path,
    at: SocketAddr,
) -> Result<Process, Failure> {
    let (config, store) = (folder.join("nats.conf"), folder.join("nats.store"));
    let text = format!(
        "host: 127.0.0.1\nport: {}\njetstream {{ store_dir: \"{}\" }}\n",
        at.port(),
        store.display()
    );
    std::fs::write(&config, text)?;
    let config = config.display().to_string();
    let mut process = Process::start(program, "nats", folder, &["-c", &config], "")?;
    let started = Instant::now();
    while !is_ready(at) {
        process.check(folder)?;
        if started.elapsed() > START_TIMEOUT {
            return Err("nats-server accepts no connections in time".into());
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(process)
}

/// Whether the server sends its greeting, and the greeting says that JetStream is enabled.
fn is_ready(at: SocketAddr) -> bool {
    let greeting = || {
        let mut stream = TcpStream::connect_timeout(&at, Duration::from_millis(200)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        let mut text = [0; 2048];
        let read = stream.read(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text[..read]).into_owned())
    };
    greeting().is_some_and(|text| text.starts_with("INFO") && text.contains("\"jetstream\":true"))
}
