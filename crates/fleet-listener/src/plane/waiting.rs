//! Changes as the broker delivered them. They wait encoded, because decoded they may take many times
//! as much memory, and are decoded one message at a time.

use bytes::Bytes;
use prost::{DecodeError, Message};
use splitrail_proto::v1;

/// Maximum size of a message in bytes. A shim's change has up to 1 MiB, as on a stream, and those
/// before it in a message up to 256 KiB.
const MESSAGE_MAX_BYTES: usize = 2 << 20;
/// Maximum memory in bytes that a message may take once it is decoded. A shim's message of 1 MiB,
/// the most that a broker takes by default, has fewer: each of its changes names a block.
const DECODED_MAX_BYTES: usize = 16 << 20;
/// A growing list may have twice the needed capacity.
const CAPACITY: usize = 2;

/// A message of changes that waits for its worker's session.
#[derive(Debug, Default)]
pub(super) struct WaitingChanges {
    /// The mirror that the changes are of.
    pub(super) mirror_id: String,
    /// The number of the first change; `None` if there is none.
    pub(super) first: Option<u64>,
    pub(super) payload: Box<[u8]>,
}

impl WaitingChanges {
    /// The memory that the message takes, in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.mirror_id.len() + self.payload.len()
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// It is not a message of changes.
    pub(super) fn decode(&self) -> Result<v1::PlaneEvents, DecodeError> {
        v1::PlaneEvents::decode(&self.payload[..])
    }
}

/// What is read of a `PlaneEvents` before it is decoded: for whom it is, and how much memory its
/// changes would take.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MessageHead {
    #[prost(string, tag = "1")]
    pub(super) worker_id: String,
    #[prost(string, tag = "3")]
    mirror_id: String,
    #[prost(message, repeated, tag = "4")]
    events: Vec<EventsHead>,
}

/// What is read of an `Events`.
#[derive(Clone, PartialEq, Message)]
struct EventsHead {
    #[prost(uint64, tag = "1")]
    sequence: u64,
    /// Counts the changes. A list of empty messages takes no memory.
    #[prost(message, repeated, tag = "4")]
    changes: Vec<()>,
}

impl MessageHead {
    /// Reads a message's head; `None` if the payload is not such a message, or would take more than
    /// `DECODED_MAX_BYTES` decoded.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        if payload.len() > MESSAGE_MAX_BYTES {
            return None;
        }
        let head = Self::decode(payload).ok()?;
        (head.decoded_bytes(payload.len()) <= DECODED_MAX_BYTES).then_some(head)
    }

    /// The memory in bytes that a message of this size may take once it is decoded.
    fn decoded_bytes(&self, payload_bytes: usize) -> usize {
        let changes: usize = self.events.iter().map(|events| events.changes.len()).sum();
        let lists = self.events.len() * size_of::<v1::Events>() + changes * size_of::<v1::Change>();
        CAPACITY * (payload_bytes + lists)
    }

    /// The message as it waits. The payload is copied, so that it does not keep the buffer in which
    /// it arrived.
    pub(super) fn into_waiting(self, payload: &Bytes) -> WaitingChanges {
        let first = self.events.first().map(|events| events.sequence);
        WaitingChanges { mirror_id: self.mirror_id, first, payload: payload[..].into() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_proto::v1::change::Change;

    use super::*;

    /// A message of one event with the given number of changes.
    fn message(change: Option<Change>, changes: usize) -> v1::PlaneEvents {
        let changes = vec![v1::Change { change }; changes];
        let events = vec![v1::Events { sequence: 7, changes, ..v1::Events::default() }];
        let (worker_id, mirror_id) = ("w".to_owned(), "m".to_owned());
        v1::PlaneEvents { worker_id, mirror_id, events, ..v1::PlaneEvents::default() }
    }

    fn removed() -> Option<Change> {
        Some(Change::Removed(v1::Removed { names: vec![7], tier: 0 }))
    }

    #[test]
    fn a_message_waits_as_it_arrived() {
        let sent = message(removed(), 3);
        let payload = Bytes::from(sent.encode_to_vec());
        let head = MessageHead::read(&payload).unwrap();
        assert_eq!(head.worker_id, "w");
        let waiting = head.into_waiting(&payload);
        assert_eq!((waiting.mirror_id.as_str(), waiting.first), ("m", Some(7)));
        assert!(waiting.bytes() < payload.len() + 100);
        assert_eq!(waiting.decode().unwrap(), sent);
    }

    #[test]
    fn a_mebibyte_of_removed_blocks_is_no_more_than_a_message_may_be() {
        let one = message(removed(), 1).events[0].changes[0].encoded_len() + 2;
        let payload = message(removed(), (1 << 20) / one).encode_to_vec();
        assert!(payload.len() > 1_040_000 && MessageHead::read(&payload).is_some());
    }

    #[test]
    fn a_message_that_would_take_much_memory_is_not_decoded() {
        let cleared = Some(Change::Cleared(v1::Cleared {}));
        for (change, count) in [(None, 400_000), (cleared, 200_000)] {
            let payload = message(change, count).encode_to_vec();
            assert!(payload.len() < 1 << 20 && MessageHead::read(&payload).is_none());
        }
        let events = vec![v1::Events::default(); 400_000];
        let payload = v1::PlaneEvents { events, ..v1::PlaneEvents::default() }.encode_to_vec();
        assert!(payload.len() < 1 << 20 && MessageHead::read(&payload).is_none());
        assert!(MessageHead::read(&[0xff; 40]).is_none());
    }
}
