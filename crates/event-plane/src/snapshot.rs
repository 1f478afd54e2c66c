//! A stored snapshot: its parts, each after its length, and a label in the metadata of the object.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut as _, BytesMut};
use prost::Message as _;
use splitrail_proto::v1::SnapshotPart;
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

/// Maximum size of a part in bytes; a part carries some thousands of blocks.
const PART_MAX_BYTES: usize = 1 << 20;

/// What a snapshot contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The mirror's id.
    pub mirror_id: String,
    /// The last change that the snapshot contains.
    pub sequence: u64,
    /// The stream's number of a message after which the stream has all changes that follow the
    /// snapshot.
    pub stream_sequence: u64,
}

impl Label {
    /// The label as metadata of the object.
    #[must_use]
    pub fn to_metadata(&self) -> HashMap<String, String> {
        HashMap::from([
            ("mirror_id".to_owned(), self.mirror_id.clone()),
            ("sequence".to_owned(), self.sequence.to_string()),
            ("stream_sequence".to_owned(), self.stream_sequence.to_string()),
        ])
    }

    /// Reads a label from the metadata of an object; `None` if it is missing or invalid.
    #[must_use]
    pub fn from_metadata(metadata: &HashMap<String, String>) -> Option<Self> {
        let number = |key: &str| metadata.get(key)?.parse().ok();
        Some(Self {
            mirror_id: metadata.get("mirror_id")?.clone(),
            sequence: number("sequence")?,
            stream_sequence: number("stream_sequence")?,
        })
    }
}

/// Parts in the stored format; each is encoded when it is read.
#[derive(Debug)]
pub struct StoredParts<P> {
    parts: P,
    made: BytesMut,
}

impl<P> StoredParts<P> {
    /// Encodes these parts.
    pub fn new(parts: P) -> Self {
        Self { parts, made: BytesMut::new() }
    }
}

impl<P: Iterator<Item = SnapshotPart> + Unpin> AsyncRead for StoredParts<P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Fills the buffer, because each read becomes one message of the store.
        while self.made.len() < buffer.remaining()
            && let Some(part) = self.parts.next()
        {
            let length = u32::try_from(part.encoded_len()).map_err(io::Error::other)?;
            self.made.put_u32(length);
            part.encode(&mut self.made).map_err(io::Error::other)?;
        }
        let length = self.made.len().min(buffer.remaining());
        buffer.put_slice(&self.made.split_to(length));
        Poll::Ready(Ok(()))
    }
}

/// Reads the next part; `None` at the end.
///
/// # Errors
/// The reader failed, or the bytes are not a part.
pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<SnapshotPart>> {
    let mut length = [0; 4];
    if from.read(&mut length[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut length[1..]).await?;
    let length = u32::from_be_bytes(length) as usize;
    if length > PART_MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a part is too long"));
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).await?;
    SnapshotPart::decode(bytes.as_slice()).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn part(rank: u32, last: bool) -> SnapshotPart {
        let mirror_id = "m".to_owned();
        SnapshotPart { mirror_id, sequence: 7, rank, last, ..SnapshotPart::default() }
    }

    #[tokio::test]
    async fn an_encoded_snapshot_is_decoded_and_a_malformed_one_is_refused() {
        let mut stored = Vec::new();
        let mut parts = StoredParts::new([part(0, false), part(1, true)].into_iter());
        parts.read_to_end(&mut stored).await.unwrap();
        let mut from = stored.as_slice();
        assert_eq!(read(&mut from).await.unwrap(), Some(part(0, false)));
        assert_eq!(read(&mut from).await.unwrap(), Some(part(1, true)));
        assert_eq!(read(&mut from).await.unwrap(), None);
        for cut in 1..stored.len() {
            let mut from = &stored[..cut];
            let mut parts = 0;
            while let Ok(Some(_)) = read(&mut from).await {
                parts += 1;
            }
            assert!(parts <= 1, "cut at {cut}");
        }
        assert!(read(&mut [0xff; 64].as_slice()).await.is_err());
    }

    #[test]
    fn labels_round_trip_through_metadata() {
        let label = Label { mirror_id: "m".to_owned(), sequence: 7, stream_sequence: 9 };
        assert_eq!(Label::from_metadata(&label.to_metadata()), Some(label));
        assert_eq!(Label::from_metadata(&HashMap::new()), None);
    }
}
