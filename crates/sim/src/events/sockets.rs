//! The sockets of each rank's KV events.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Encoder, EventSink, History, PUBLISH_QUEUE_BATCHES, bind_pub, bind_router};
use super::{publish, replay};
use crate::config::SimConfig;
use crate::faults::FaultBoard;

/// The addresses of a rank's events.
#[derive(Debug, Clone)]
pub(crate) struct Endpoints {
    pub(crate) events: Option<String>,
    pub(crate) replay: Option<String>,
}

impl Endpoints {
    /// The port of the rank's events.
    pub(crate) fn events_port(&self) -> Option<u16> {
        port_of(self.events.as_deref()?)
    }

    /// The port of the rank's replays.
    pub(crate) fn replay_port(&self) -> Option<u16> {
        port_of(self.replay.as_deref()?)
    }
}

/// The sockets of one rank's KV events, bound before the engine starts.
#[derive(Default)]
pub(crate) struct EventSockets {
    publisher: Option<(zeromq::PubSocket, String)>,
    replay: Option<(zeromq::RouterSocket, String)>,
}

/// Number of attempts to find consecutive free ports.
const PORT_ATTEMPTS: usize = 64;

impl EventSockets {
    /// The sockets of all ranks, on consecutive ports as with the real engine.
    pub(crate) async fn bind(config: &SimConfig) -> io::Result<Vec<Self>> {
        let fixed = |port: Option<u16>| port.is_none_or(|port| port > 0);
        let tries = match fixed(config.kv_events_port) && fixed(config.kv_replay_port) {
            true => 1,
            false if config.data_parallel == 1 => 1,
            false => PORT_ATTEMPTS,
        };
        let mut failed = io::Error::from(io::ErrorKind::AddrInUse);
        for _ in 0..tries {
            match Self::try_bind(config).await {
                Ok(sockets) => return Ok(sockets),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn try_bind(config: &SimConfig) -> io::Result<Vec<Self>> {
        let mut ranks: Vec<Self> = Vec::new();
        for rank in 0..config.data_parallel {
            let first = ranks.first().map(Self::endpoints);
            let address = |port: u16, first: Option<String>| -> io::Result<String> {
                let port = match first.as_deref().and_then(port_of) {
                    Some(first) => first.checked_add(rank).ok_or(io::ErrorKind::AddrInUse)?,
                    None => port,
                };
                Ok(format!("tcp://{}", SocketAddr::new(config.host, port)))
            };
            let mut sockets = Self::default();
            if let Some(port) = config.kv_events_port {
                let address = address(port, first.clone().and_then(|first| first.events))?;
                sockets.publisher = Some(bind_pub(&address).await.map_err(io::Error::other)?);
            }
            if let Some(port) = config.kv_replay_port {
                let address = address(port, first.and_then(|first| first.replay))?;
                sockets.replay = Some(bind_router(&address).await.map_err(io::Error::other)?);
            }
            ranks.push(sockets);
        }
        Ok(ranks)
    }

    pub(crate) fn endpoints(&self) -> Endpoints {
        Endpoints {
            events: self.publisher.as_ref().map(|(_, endpoint)| endpoint.clone()),
            replay: self.replay.as_ref().map(|(_, endpoint)| endpoint.clone()),
        }
    }

    /// Starts the tasks; returns the sink for the rank's events.
    pub(crate) fn spawn(
        self,
        rank: u16,
        config: &SimConfig,
        topic: &str,
        faults: &Arc<FaultBoard>,
        tasks: &mut JoinSet<()>,
    ) -> EventSink {
        let history = History::new(config.replay_batches);
        if let Some((socket, _)) = self.replay {
            tasks.spawn(replay(socket, topic.to_owned(), history.clone()));
        }
        let publisher = self.publisher.map(|(socket, _)| {
            let (sender, batches) = mpsc::channel(PUBLISH_QUEUE_BATCHES);
            tasks.spawn(publish(socket, batches, topic.to_owned(), Arc::clone(faults)));
            sender
        });
        let encoder = Encoder {
            form: config.event_form,
            hashes: config.hash_form,
            block_size: config.block_size,
            full_group: config.cache_groups.len(),
        };
        let faults = Arc::clone(faults);
        let clock_ahead_s = config.clock_ahead_s;
        EventSink { encoder, rank, clock_ahead_s, history, publisher, next_sequence: 0, faults }
    }
}

fn port_of(endpoint: &str) -> Option<u16> {
    endpoint.rsplit_once(':')?.1.parse().ok()
}
