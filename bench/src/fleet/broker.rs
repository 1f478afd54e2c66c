//! A broker for the event plane: `nats-server` as a process of its own, where it is installed.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::Failure;
use super::process::Process;

/// How long it may take to start, and between two looks.
const PATIENCE: Duration = Duration::from_secs(20);
const GLANCE: Duration = Duration::from_millis(50);

/// Where the server is, if it is anywhere.
pub(super) fn nats_server() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NATS_SERVER") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/bin".into()]);
    folders.map(|folder| folder.join("nats-server")).find(|file| file.is_file())
}

/// Starts it with JetStream, whose files lie in a folder, and waits until it takes connections.
///
/// # Errors
/// If it does not come up.
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
    while !greets(at) {
        process.check(folder)?;
        if started.elapsed() > PATIENCE {
            return Err("nats-server does not come up".into());
        }
        sleep(GLANCE).await;
    }
    Ok(process)
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
