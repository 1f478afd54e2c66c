//! Reads snapshots from the broker's object store.

use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use splitrail_event_plane::async_nats::jetstream::object_store::Object;
use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::{self, Label};
use splitrail_proto::v1;
use tokio::time::timeout;

use super::model::Model;

/// How long the broker may take for one part.
const PART: Duration = Duration::from_secs(5);
/// How long it may take to list what it has.
const LIST: Duration = Duration::from_secs(10);

/// A snapshot that is being fetched: its last part comes out only if the whole is sound.
pub(super) struct Fetch {
    object: Object,
    label: Label,
    /// Read, but not given away.
    next: Option<v1::SnapshotPart>,
}

impl Model {
    /// What the store has of a worker.
    pub(super) async fn label(&self, token: &str) -> io::Result<Option<Label>> {
        let bucket = self.broker.context.get_object_store(names::bucket(&self.name)).await;
        let bucket = bucket.map_err(io::Error::other)?;
        match bucket.info(token).await {
            Ok(info) if info.deleted => Ok(None),
            Ok(info) => Ok(Label::from_metadata(&info.metadata)),
            // Not to be there and to be out of reach lead to the same: it is asked for.
            Err(error) => {
                tracing::debug!(%error, token, "no snapshot");
                Ok(None)
            }
        }
    }

    /// Begins to fetch it.
    pub(super) async fn fetch(&self, token: &str) -> io::Result<Fetch> {
        let bucket = self.broker.context.get_object_store(names::bucket(&self.name)).await;
        let bucket = bucket.map_err(io::Error::other)?;
        let object = bucket.get(token).await.map_err(io::Error::other)?;
        let label = Label::from_metadata(&object.info.metadata);
        let label = label.ok_or_else(|| nonsense("nothing says what it is of"))?;
        let mut fetch = Fetch { object, label, next: None };
        fetch.next = fetch.read().await?;
        Ok(fetch)
    }

    /// The stream's number behind which nothing is missing that the stored snapshots lack.
    pub(super) async fn oldest_snapshot(&self) -> Option<u64> {
        let listing = async {
            let bucket = self.broker.context.get_object_store(names::bucket(&self.name)).await;
            let mut list = bucket.ok()?.list().await.ok()?;
            let mut oldest: Option<u64> = None;
            while let Some(Ok(info)) = list.next().await {
                if let Some(label) = Label::from_metadata(&info.metadata) {
                    let sequence = label.stream_sequence;
                    oldest = Some(oldest.map_or(sequence, |oldest| oldest.min(sequence)));
                }
            }
            oldest
        };
        timeout(LIST, listing).await.ok().flatten()
    }
}

impl Fetch {
    /// What it is of.
    pub(super) fn label(&self) -> &Label {
        &self.label
    }

    /// The next part; `None` behind the last.
    pub(super) async fn part(&mut self) -> io::Result<Option<v1::SnapshotPart>> {
        let Some(part) = self.next.take() else { return Ok(None) };
        let is_of_it =
            part.mirror_id == self.label.mirror_id && part.sequence == self.label.sequence;
        self.next = self.read().await?;
        if !is_of_it || part.last != self.next.is_none() {
            return Err(nonsense("its parts are not of one snapshot"));
        }
        Ok(Some(part))
    }

    /// The whole is checked against its digest when its end is read.
    async fn read(&mut self) -> io::Result<Option<v1::SnapshotPart>> {
        let reading = snapshot::read(&mut self.object);
        timeout(PART, reading).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

fn nonsense(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
