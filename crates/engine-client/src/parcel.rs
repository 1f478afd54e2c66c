//! A request's body that records whether it may have been sent.
//!
//! A hand-off that an engine may have received is used up. One whose request got
//! no connection, or was dropped before, is not: no byte of its body was written.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use bytes::Bytes;

use splitrail_api::Parts;

const HERE: u8 = 0;
const SENT: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// A request's body on its way.
pub struct Parcel {
    parts: Parts,
    state: Arc<AtomicU8>,
    /// Whether an engine may receive it once only.
    once: bool,
}

/// What its sender keeps of a [`Parcel`].
#[derive(Clone, Debug)]
pub struct Receipt(Arc<AtomicU8>);

impl Parcel {
    /// A body that can be sent again where a connection was lost before it was answered, and
    /// its sender's receipt.
    pub fn new(parts: impl Into<Parts>) -> (Self, Receipt) {
        let state = Arc::new(AtomicU8::new(HERE));
        (Self { parts: parts.into(), state: Arc::clone(&state), once: false }, Receipt(state))
    }

    /// The same body, which an engine must not receive twice: it carries a hand-off, or the name
    /// under which two legs meet.
    pub fn once(self) -> Self {
        Self { once: true, ..self }
    }

    /// Whether it may be sent again once an engine may have received it.
    pub fn is_repeatable(&self) -> bool {
        !self.once
    }

    /// Whether no byte of it was sent, and it was not taken back.
    fn is_here(&self) -> bool {
        self.state.load(SeqCst) == HERE
    }

    /// The bytes, for a connection that is going to write them now: from now on an engine may
    /// have received them. `None` if the body was taken back, or would be sent a second time and
    /// must not be.
    pub(super) fn send(&self) -> Option<&Parts> {
        let before = self.state.compare_exchange(HERE, SENT, SeqCst, SeqCst);
        let may = before.is_ok() || (before == Err(SENT) && !self.once);
        may.then_some(&self.parts)
    }

    /// The bytes, to be counted.
    pub(super) fn parts(&self) -> &Parts {
        &self.parts
    }
}

/// Bodies are prompts: their bytes are not shown.
impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parcel = f.debug_struct("Parcel");
        parcel.field("is_here", &self.is_here()).field("once", &self.once).finish_non_exhaustive()
    }
}

impl From<Bytes> for Parcel {
    fn from(bytes: Bytes) -> Self {
        Self::new(bytes).0
    }
}

impl From<Parts> for Parcel {
    fn from(parts: Parts) -> Self {
        Self::new(parts).0
    }
}

impl Receipt {
    /// Takes the body back; `false` if it may have been sent. Once it is taken back, it is
    /// never sent, whatever holds it.
    pub fn take_back(&self) -> bool {
        self.0.compare_exchange(HERE, TAKEN_BACK, SeqCst, SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: Bytes = Bytes::from_static(b"body");

    #[test]
    fn a_body_that_may_have_been_sent_cannot_be_taken_back_nor_the_other_way_round() {
        let (parcel, receipt) = Parcel::new(BODY);
        assert_eq!(parcel.send().cloned().map(Parts::into_bytes), Some(BODY));
        assert!(!receipt.take_back());
        let (parcel, receipt) = Parcel::new(BODY);
        assert!(receipt.take_back());
        assert!(!receipt.take_back(), "it can be used once");
        assert!(parcel.send().is_none());
    }

    #[test]
    fn a_hand_off_is_sent_once_and_another_body_as_often_as_connections_are_lost() {
        let (parcel, _) = Parcel::new(BODY);
        assert!(parcel.send().is_some() && parcel.send().is_some());
        let (parcel, _) = Parcel::new(BODY);
        let parcel = parcel.once();
        assert!(parcel.send().is_some() && parcel.send().is_none());
    }

    #[test]
    fn a_body_shows_none_of_its_bytes() {
        let (parcel, _) = Parcel::new(BODY);
        let shown = format!("{parcel:?}");
        assert!(!shown.contains("body") && !shown.contains("98"), "{shown}");
    }
}
