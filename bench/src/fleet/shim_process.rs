//! The process of a real shim, which runs beside a scripted engine.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::engine::Engine;
use super::options::Options;
use super::process::{Process, free_ports};
use super::router::Router;
use super::{Failure, http};

/// Maximum time until the shim's mirror is complete and all routers follow it.
const SYNC_TIMEOUT: Duration = Duration::from_secs(180);
/// Interval between two reads of the shim's metrics.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A running shim. Dropping it kills the process.
pub(super) struct ShimProcess {
    /// The process.
    pub(super) process: Process,
    /// The address of the shim's listener.
    pub(super) address: SocketAddr,
}

impl ShimProcess {
    /// Starts a shim that attaches to the given routers.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn start(
        options: &Options,
        folder: &Path,
        engine: &Engine,
        routers: &[&Router],
    ) -> Result<Self, Failure> {
        let [address] = free_ports()?;
        let fleet = routers.iter().filter_map(|router| router.running.addresses.fleet);
        let fleet: Vec<String> = fleet.map(|address| address.to_string()).collect();
        let (engine, listen) = (format!("http://{}", engine.http), address.to_string());
        let routers = fleet.join(",");
        let args = ["--engine", &engine, "--listen", &listen, "--router", &routers];
        let args = [&args[..], &["--role", "both", "--id", "w"]].concat();
        let process = Process::start(&options.shim, "shim", folder, &args, "warn")?;
        Ok(Self { process, address })
    }

    /// Waits until the mirror has exactly `blocks` blocks, and `routers` routers have received all
    /// of them and get each further change at once.
    ///
    /// # Errors
    /// The process ends, or the numbers are not reached in time.
    pub(super) async fn wait_until_synchronised(
        &mut self,
        folder: &Path,
        blocks: usize,
        routers: usize,
    ) -> Result<(), Failure> {
        let mut seen = (0.0, 0.0);
        let polling = async {
            while seen != (blocks as f64, routers as f64) {
                sleep(POLL_INTERVAL).await;
                self.process.check(folder)?;
                let (held, live) = tokio::join!(
                    self.metric("splitrail_shim_mirror_blocks"),
                    self.metric("splitrail_shim_router_live"),
                );
                seen = (held.unwrap_or_default(), live.unwrap_or_default());
            }
            Ok::<_, Failure>(())
        };
        match timeout(SYNC_TIMEOUT, polling).await {
            Ok(polled) => polled,
            Err(_) => {
                let (held, live) = seen;
                let seen =
                    format!("{held} blocks of {blocks} and {live} live routers of {routers}");
                Err(format!("the shim has {seen} after {} s", SYNC_TIMEOUT.as_secs()).into())
            }
        }
    }

    /// The sum of one of the shim's own metrics.
    ///
    /// # Errors
    /// The shim does not reply.
    pub(super) async fn metric(&self, name: &str) -> Result<f64, Failure> {
        http::metric(self.address, "/splitrail/metrics", name).await
    }
}
