//! The frames of live and replayed messages.

use bytes::Bytes;

use super::super::sequence::NumberedBatch;
use super::GarbageError;

/// The number that marks the end of a replay.
const END: u64 = u64::MAX;

/// A message of a replay.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplayMessage {
    Batch(NumberedBatch),
    End,
}

/// Reads a live message: topic, number, payload.
pub(super) fn live(frames: Vec<Bytes>) -> Result<NumberedBatch, GarbageError> {
    let count = frames.len();
    match numbered(frames) {
        Some(batch) if count == 3 && batch.sequence != END => Ok(batch),
        _ => Err(GarbageError::Frames { frames: count }),
    }
}

/// Parses a message of a replay. Depending on the version, an empty frame, the topic or both
/// precede number and payload.
pub(super) fn replayed(frames: Vec<Bytes>) -> Result<ReplayMessage, GarbageError> {
    let count = frames.len();
    match numbered(frames) {
        Some(batch) if batch.sequence == END => Ok(ReplayMessage::End),
        Some(batch) if count <= 4 => Ok(ReplayMessage::Batch(batch)),
        _ => Err(GarbageError::Frames { frames: count }),
    }
}

/// The last two frames as number and payload.
fn numbered(mut frames: Vec<Bytes>) -> Option<NumberedBatch> {
    let payload = frames.pop()?;
    let sequence = u64::from_be_bytes(frames.pop()?.as_ref().try_into().ok()?);
    Some(NumberedBatch { sequence, payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(frames: &[&[u8]]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
    }

    const ONE: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 1];
    const LAST: &[u8] = &[0xff; 8];

    #[test]
    fn replies_of_all_versions_are_read() {
        let batch = NumberedBatch { sequence: 1, payload: Bytes::from_static(b"p") };
        for reply in
            [&[ONE, b"p"][..], &[b"", ONE, b"p"], &[b"kv@x", ONE, b"p"], &[b"", b"kv@x", ONE, b"p"]]
        {
            assert_eq!(replayed(frames(reply)), Ok(ReplayMessage::Batch(batch.clone())));
        }
        for end in [&[LAST, b""][..], &[b"", LAST, b""]] {
            assert_eq!(replayed(frames(end)), Ok(ReplayMessage::End));
        }
    }

    #[test]
    fn messages_of_another_form_are_garbage() {
        for message in [
            &[b"x" as &[u8]][..],
            &[ONE, b"p"],
            &[b"", b"1234567", b"p"],
            &[b"", LAST, b"p"],
            &[b"", b"", ONE, b"p"],
        ] {
            let garbage = Err(GarbageError::Frames { frames: message.len() });
            assert_eq!(live(frames(message)), garbage);
        }
        assert!(replayed(frames(&[b"p"])).is_err());
        assert!(replayed(frames(&[b"", b"1234567", b"p"])).is_err());
    }
}
