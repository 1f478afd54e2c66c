//! Tests of the streams to routers: a router always learns what the engine holds.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/support/fake_router.rs"]
mod fake_router;

mod engine;
mod failures;
mod incompatible;
mod random;
mod reports;
mod tls;

use std::time::Duration;

use splitrail_proto::v1::{Capabilities, Load, WorkerRole};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::engine::{BLOCK_SIZE, Engine};
use self::fake_router::{FakeRouter, content, welcome};
use super::{AttachConfig, RouterStatus, RouterStatuses, Stage, Timing};
use crate::mirror::{self, Mirror};

/// A shim without sockets to an engine. The simulated engine changes the mirror directly.
struct Shim {
    mirror: Mirror,
    status: RouterStatuses,
    capabilities: watch::Sender<Capabilities>,
    load: watch::Sender<Load>,
    leaving: CancellationToken,
    _tasks: JoinSet<()>,
}

fn config(routers: &[&FakeRouter]) -> AttachConfig {
    AttachConfig {
        routers: routers.iter().map(|router| router.address.to_string().parse().unwrap()).collect(),
        worker_id: "p0".to_owned(),
        role: WorkerRole::Prefill,
        url: "http://127.0.0.1:1".to_owned(),
        model: "engine-model".to_owned(),
        grace: Duration::from_secs(3),
        token: None,
        tls: None,
        timing: Timing {
            retry_min: Duration::from_millis(2),
            retry_max: Duration::from_millis(50),
            refused_retry: Duration::from_millis(50),
            resolve_interval: Duration::from_millis(200),
            in_step_timeout: Duration::ZERO,
            ..Timing::default()
        },
        status: RouterStatuses::default(),
    }
}

/// A mirror whose ring holds only a few changes.
fn small_mirror() -> Mirror {
    Mirror::new(mirror::MirrorConfig {
        blocks_max: 1 << 16,
        ring_bytes_max: 4 << 10,
        ..mirror::MirrorConfig::default()
    })
}

impl Shim {
    fn start(mirror: Mirror, config: AttachConfig) -> Self {
        let (capabilities, reported_capabilities) = watch::channel(Capabilities {
            engine: "vllm".to_owned(),
            block_size: Some(BLOCK_SIZE),
            ..Capabilities::default()
        });
        let (load, reported_load) = watch::channel(Load { up: true, ..Load::default() });
        let (leaving, status) = (CancellationToken::new(), config.status.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(super::run(
            config,
            mirror.clone(),
            reported_capabilities,
            reported_load,
            leaving.clone(),
        ));
        Self { mirror, status, capabilities, load, leaving, _tasks: tasks }
    }

    /// The status of the only router.
    fn router(&self) -> RouterStatus {
        self.status.routers().pop().unwrap()
    }

    /// Waits until `is_so` holds for the status of a router.
    async fn wait_for(&self, what: &str, is_so: impl Fn(&RouterStatus) -> bool) {
        let waiting = async {
            while !self.status.routers().iter().any(&is_so) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await;
        assert!(waited.is_ok(), "{what} never came: {:?}", self.status.routers());
    }

    /// Waits until a router has everything, and compares it with what the engine holds.
    async fn agrees(&self, engine: &Engine, router: &FakeRouter) {
        let is_there = |known: &fake_router::RouterState| {
            let (_, mirror_id) = self.mirror.id();
            let sequence = self.mirror.position().borrow().sequence;
            !known.faults.is_empty()
                || (!mirror_id.is_empty()
                    && (&known.mirror_id, known.sequence) == (&mirror_id, sequence))
        };
        router.wait_for("everything", is_there).await;
        let known = router.known();
        assert_eq!(known.faults, Vec::<String>::new());
        known.index.check().unwrap();
        for rank in engine::RANKS {
            assert_eq!(content(&known.index, rank), content(&engine.truth, rank), "rank {rank}");
        }
    }
}
