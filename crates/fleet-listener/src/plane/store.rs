//! Reads snapshots from the broker's object store.

use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use splitrail_event_plane::async_nats::jetstream::object_store::Object;
use splitrail_event_plane::names;
use splitrail_event_plane::snapshot::{self, Label};
use splitrail_proto::v1;
use tokio::time::timeout;

use super::model::PlaneModel;

/// Maximum time to read one part.
const PART: Duration = Duration::from_secs(5);
/// Maximum time to list the stored snapshots.
const LIST: Duration = Duration::from_secs(10);

/// A snapshot that is being fetched. Its last part is returned only if the digest of the whole
/// object is correct.
pub(super) struct Fetch {
    object: Object,
    label: Label,
    /// A part that was read and is not yet returned.
    next: Option<v1::SnapshotPart>,
}

impl PlaneModel {
    /// The label of a worker's stored snapshot.
    pub(super) async fn label(&self, token: &str) -> io::Result<Option<Label>> {
        let bucket = self.broker.context.get_object_store(names::bucket(&self.name)).await;
        let bucket = bucket.map_err(io::Error::other)?;
        match bucket.info(token).await {
            Ok(info) if info.deleted => Ok(None),
            Ok(info) => Ok(Label::from_metadata(&info.metadata)),
            // Whether the snapshot does not exist or cannot be reached: one is requested.
            Err(error) => {
                tracing::debug!(%error, token, "no snapshot");
                Ok(None)
            }
        }
    }

    /// Begins to fetch a worker's snapshot.
    pub(super) async fn fetch(&self, token: &str) -> io::Result<Fetch> {
        let bucket = self.broker.context.get_object_store(names::bucket(&self.name)).await;
        let bucket = bucket.map_err(io::Error::other)?;
        let object = bucket.get(token).await.map_err(io::Error::other)?;
        let label = Label::from_metadata(&object.info.metadata);
        let label = label.ok_or_else(|| nonsense("the stored snapshot has no label"))?;
        let mut fetch = Fetch { object, label, next: None };
        fetch.next = fetch.read().await?;
        Ok(fetch)
    }

    /// The stream's number after which the stream has everything that the stored snapshots lack.
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
    /// The label of the snapshot.
    pub(super) fn label(&self) -> &Label {
        &self.label
    }

    /// The next part; `None` after the last.
    pub(super) async fn part(&mut self) -> io::Result<Option<v1::SnapshotPart>> {
        let Some(part) = self.next.take() else { return Ok(None) };
        let is_of_snapshot =
            part.mirror_id == self.label.mirror_id && part.sequence == self.label.sequence;
        self.next = self.read().await?;
        if !is_of_snapshot || part.last != self.next.is_none() {
            return Err(nonsense("the parts are of different snapshots"));
        }
        Ok(Some(part))
    }

    /// Reads one part. The digest is checked at the end of the object.
    async fn read(&mut self) -> io::Result<Option<v1::SnapshotPart>> {
        let reading = snapshot::read(&mut self.object);
        timeout(PART, reading).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

fn nonsense(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
