//! A Prometheus with our rules without their waiting times, beside the routers of a test.

use std::net::SocketAddr;

use tempfile::TempDir;

use crate::files::rules_at_once;
use crate::runbook::follow;
use crate::server::Prometheus;

/// A Prometheus that scrapes routers.
pub(super) struct Watch {
    pub(super) prometheus: Prometheus,
    admin: SocketAddr,
    _folder: TempDir,
}

impl Watch {
    /// Starts it, and waits until all routers are scraped at their admin listeners. Commands of the
    /// guide ask the first one.
    pub(super) async fn of(admins: &[SocketAddr]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rules = rules_at_once(folder.path());
        let prometheus = Prometheus::start(folder.path(), admins, &rules).await;
        prometheus.has_scraped(admins.len()).await;
        // Before that, `SplitrailDown` fires.
        prometheus.has_evaluated().await;
        Self { prometheus, admin: admins[0], _folder: folder }
    }

    /// Waits until exactly these alerts fire, and follows their sections in the guide.
    pub(super) async fn fires(&self, alerts: &[&str]) {
        self.prometheus.fires(alerts).await;
        for alert in alerts {
            follow(&self.prometheus, self.admin, alert).await;
        }
    }

    /// Waits until no alert fires.
    pub(super) async fn is_healthy(&self) {
        self.prometheus.fires(&[]).await;
    }
}
