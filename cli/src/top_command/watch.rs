//! Follows the live streams of all replicas.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::live::{LiveSnapshot, SCHEMA};
use crate::admin::{AskError, Event, Replica};

/// The path of the stream.
const PATH: &str = "/admin/live";

/// Time after which a stream on which nothing comes counts as broken. Snapshots of a very large
/// fleet come at intervals of many seconds.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Time before the next try to follow a stream.
const RETRY: Duration = Duration::from_secs(1);

/// Number of updates that may wait to be shown.
const WAITING_MAX: usize = 64;

/// News of one replica: its snapshot, or why there is none.
pub(super) struct Update {
    /// The place of the replica.
    pub(super) replica: usize,
    pub(super) news: Result<LiveSnapshot, AskError>,
}

/// The streams of all replicas. Dropping it ends them.
pub(super) struct Watch {
    updates: mpsc::Receiver<Update>,
    _tasks: JoinSet<()>,
}

impl Watch {
    /// Starts to follow the replicas; broken streams are opened again.
    pub(super) fn start(replicas: &[Replica]) -> Self {
        let (sender, updates) = mpsc::channel(WAITING_MAX);
        let mut tasks = JoinSet::new();
        for (place, replica) in replicas.iter().enumerate() {
            tasks.spawn(follow(place, replica.clone(), sender.clone()));
        }
        Self { updates, _tasks: tasks }
    }

    /// The next update of any replica.
    pub(super) async fn next(&mut self) -> Option<Update> {
        self.updates.recv().await
    }

    /// An update that has come already.
    pub(super) fn try_next(&mut self) -> Option<Update> {
        self.updates.try_recv().ok()
    }
}

async fn follow(place: usize, replica: Replica, updates: mpsc::Sender<Update>) {
    loop {
        let ended = once(place, &replica, &updates).await;
        let news = Err(ended.err().unwrap_or_else(|| replica.ended("the stream has ended")));
        if updates.send(Update { replica: place, news }).await.is_err() {
            return;
        }
        sleep(RETRY).await;
    }
}

/// Follows the stream until it ends.
async fn once(
    place: usize,
    replica: &Replica,
    updates: &mpsc::Sender<Update>,
) -> Result<(), AskError> {
    let mut stream = replica.follow(PATH).await?;
    while let Some(event) = stream.next(SILENCE_MAX).await? {
        let Some(snapshot) = read(replica, &event)? else { continue };
        let update = Update { replica: place, news: Ok(snapshot) };
        if updates.send(update).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// The snapshot of an event, if it is one that this program knows.
fn read(replica: &Replica, event: &Event) -> Result<Option<LiveSnapshot>, AskError> {
    match event.name.as_str() {
        "snapshot" => match serde_json::from_slice::<LiveSnapshot>(&event.data) {
            Ok(snapshot) if snapshot.schema == SCHEMA => Ok(Some(snapshot)),
            _ => Err(replica.unreadable()),
        },
        "end" => {
            let end: serde_json::Value = serde_json::from_slice(&event.data).unwrap_or_default();
            Err(replica.ended(match end["reason"].as_str() {
                Some("drained") => "the router has drained",
                Some("credential") => "the credential is not valid any more",
                _ => "the stream has ended",
            }))
        }
        _ => Ok(None),
    }
}
