//! Clients that send more than is admitted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use splitrail_tests::Client;
use splitrail_tests::client::Broken;
use tokio::task::JoinSet;

use super::admissions::Admissions;
use super::support::{REQUEST, Routers, body, millis, post, usage};

/// Clients of each router and tenant.
const CLIENTS: u32 = 2;

/// Pause of a client that was refused.
const PAUSE: Duration = Duration::from_millis(50);

/// Clients that send requests one after another until they are stopped.
pub(crate) struct Flood {
    clients: JoinSet<Result<(), Broken>>,
    is_stopped: Arc<AtomicBool>,
}

/// One client.
struct Sender {
    client: Client,
    router: usize,
    authorization: String,
    admissions: Arc<Admissions>,
    started: Instant,
    salt: u32,
}

impl Flood {
    pub(crate) fn new() -> Self {
        Self { clients: JoinSet::new(), is_stopped: Arc::default() }
    }

    /// Adds clients of a tenant at a router.
    pub(crate) fn add(
        &mut self,
        routers: &Routers,
        router: usize,
        tenant: &str,
        admissions: &Arc<Admissions>,
    ) {
        for salt in 0..CLIENTS {
            let sender = Sender {
                client: routers.client(router),
                router,
                authorization: routers.authorization(tenant),
                admissions: Arc::clone(admissions),
                started: routers.started(),
                salt,
            };
            let is_stopped = Arc::clone(&self.is_stopped);
            self.clients.spawn(async move { sender.run(&is_stopped).await });
        }
    }

    /// Stops all clients, of which none may have lost its router.
    pub(crate) async fn stop(mut self) {
        self.is_stopped.store(true, Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap().unwrap();
        }
    }

    /// Waits until all clients have lost their router.
    pub(crate) async fn until_lost(mut self) {
        while let Some(ended) = self.clients.join_next().await {
            assert!(matches!(ended.unwrap(), Err(Broken::Connection(_))));
        }
    }
}

impl Sender {
    async fn run(&self, is_stopped: &AtomicBool) -> Result<(), Broken> {
        let body = body(self.salt);
        while !is_stopped.load(Relaxed) {
            let sent_ms = millis(self.started);
            let reply = post(&self.client, &self.authorization, &body).await?;
            match reply.status.as_u16() {
                200 => {
                    assert_eq!(usage(&reply, "/total_tokens"), REQUEST);
                    let replied_ms = millis(self.started) + 1;
                    self.admissions.add(self.router, sent_ms, replied_ms, REQUEST);
                }
                429 => tokio::time::sleep(PAUSE).await,
                _ => panic!("{}: {}", reply.status, reply.text()),
            }
        }
        Ok(())
    }
}
