//! nginx as a plain proxy in the place of a shim, to compare the cost of forwarding the same
//! requests.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::Failure;
use super::process::{Process, free_ports};

/// Where nginx may be; `/usr/sbin` is not in everybody's `PATH`.
const PROGRAMS: [&str; 2] = ["nginx", "/usr/sbin/nginx"];
/// Maximum time until nginx accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A running nginx with a single process.
pub(super) struct Nginx {
    /// The process.
    pub(super) process: Process,
    /// The address of its listener.
    pub(super) address: SocketAddr,
}

impl Nginx {
    /// Starts nginx in front of an engine, with kept connections and without buffering. Returns
    /// `None` if nginx is not installed.
    ///
    /// # Errors
    /// nginx cannot be started, ends, or does not accept connections in time.
    pub(super) async fn start(folder: &Path, engine: SocketAddr) -> Result<Option<Self>, Failure> {
        let Some(program) = installed() else { return Ok(None) };
        let [address] = free_ports()?;
        let file = folder.join("nginx.conf");
        fs::write(&file, configuration(folder, address, engine))?;
        let (folder_arg, file_arg) = (folder.to_string_lossy(), file.to_string_lossy());
        let args = ["-p", &folder_arg, "-c", &file_arg, "-e", "stderr"];
        let mut process = Process::start(&program, "nginx", folder, &args, "warn")?;
        let listening = async {
            while TcpStream::connect(address).await.is_err() {
                process.check(folder)?;
                sleep(POLL_INTERVAL).await;
            }
            Ok::<_, Failure>(())
        };
        timeout(START_TIMEOUT, listening)
            .await
            .map_err(|_| "nginx accepts no connections in time")??;
        Ok(Some(Self { process, address }))
    }
}

fn installed() -> Option<PathBuf> {
    let runs = |program: &str| {
        let mut command = Command::new(program);
        command.arg("-v").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    PROGRAMS.into_iter().find(|program| runs(program)).map(PathBuf::from)
}

fn configuration(folder: &Path, listen: SocketAddr, engine: SocketAddr) -> String {
    let folder = folder.display();
    let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let folders = kinds.map(|kind| format!("  {kind}_temp_path {folder}/nginx_{kind};\n")).concat();
    format!(
        "daemon off; master_process off; worker_processes 1;
pid {folder}/nginx.pid; error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
{folders}  access_log off; tcp_nodelay on; keepalive_requests 1000000;
  upstream engine {{ server {engine}; keepalive 64; keepalive_requests 1000000; }}
  server {{
    listen {listen};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection \"\";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"
    )
}
