//! A real shim beside a scripted engine.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::engine::Engine;
use super::options::Options;
use super::process::{Process, free_ports};
use super::router::Router;
use super::{Failure, http};

/// How long it may take to know what it should.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between two looks.
const GLANCE: Duration = Duration::from_millis(100);

/// A shim's process.
pub(super) struct Shim {
    /// The process.
    pub(super) process: Process,
    /// Its listener.
    pub(super) address: SocketAddr,
}

impl Shim {
    /// Starts one that attaches to routers.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn start(
        options: &Options,
        folder: &Path,
        engine: &Engine,
        routers: &[&Router],
    ) -> Result<Self, Failure> {
        let [address] = free_ports()?;
        let fleet = routers.iter().filter_map(|router| router.running.addresses().fleet);
        let fleet: Vec<String> = fleet.map(|address| address.to_string()).collect();
        let (engine, listen) = (format!("http://{}", engine.http), address.to_string());
        let routers = fleet.join(",");
        let args = ["--engine", &engine, "--listen", &listen, "--router", &routers];
        let args = [&args[..], &["--role", "both", "--id", "w"]].concat();
        let process = Process::start(&options.shim, "shim", folder, &args, "warn")?;
        Ok(Self { process, address })
    }

    /// Waits until its mirror has so many blocks, and so many routers are told of changes as
    /// they come.
    ///
    /// # Errors
    /// If that does not come true.
    pub(super) async fn until(
        &mut self,
        folder: &Path,
        blocks: usize,
        routers: usize,
    ) -> Result<(), Failure> {
        let mut seen = (0.0, 0.0);
        let looking = async {
            while seen != (blocks as f64, routers as f64) {
                sleep(GLANCE).await;
                self.process.check(folder)?;
                let (held, live) = tokio::join!(
                    self.metric("splitrail_shim_mirror_blocks"),
                    self.metric("splitrail_shim_router_live"),
                );
                seen = (held.unwrap_or_default(), live.unwrap_or_default());
            }
            Ok::<_, Failure>(())
        };
        match timeout(PATIENCE, looking).await {
            Ok(looked) => looked,
            Err(_) => Err(format!("the shim has {seen:?} of blocks and routers").into()),
        }
    }

    /// One of its own metrics.
    ///
    /// # Errors
    /// If it does not answer.
    pub(super) async fn metric(&self, name: &str) -> Result<f64, Failure> {
        http::metric(self.address, "/splitrail/metrics", name).await
    }
}
