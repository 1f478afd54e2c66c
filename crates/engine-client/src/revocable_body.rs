//! A request's body that records whether it may have been sent.
//!
//! A hand-off that an engine may have received is used up. A hand-off whose request got no
//! connection, or was dropped earlier, is not used up, because no byte of its body was written.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use bytes::Bytes;

use splitrail_api::Parts;

const UNSENT: u8 = 0;
const SENT: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// The body of a request that is being sent.
pub struct RevocableBody {
    parts: Parts,
    state: Arc<AtomicU8>,
    /// Whether an engine must not receive the body twice.
    once: bool,
}

/// The sender's handle to a [`RevocableBody`].
#[derive(Clone, Debug)]
pub struct SendState(Arc<AtomicU8>);

impl RevocableBody {
    /// Creates a body that may be sent again if a connection is lost before the reply, with its
    /// handle.
    pub fn new(parts: impl Into<Parts>) -> (Self, SendState) {
        let state = Arc::new(AtomicU8::new(UNSENT));
        (Self { parts: parts.into(), state: Arc::clone(&state), once: false }, SendState(state))
    }

    /// Makes it a body that an engine must not receive twice, because it carries a hand-off or the
    /// name under which two legs meet.
    pub fn once(self) -> Self {
        Self { once: true, ..self }
    }

    /// Whether the body may be sent again after an engine may have received it.
    pub fn is_repeatable(&self) -> bool {
        !self.once
    }

    /// Whether no byte was sent and the body was not taken back.
    fn is_unsent(&self) -> bool {
        self.state.load(SeqCst) == UNSENT
    }

    /// The bytes, for a connection that is about to write them; from now on the engine may have
    /// received them. `None` if the body was taken back, or was sent before and must not be sent
    /// twice.
    pub(super) fn send(&self) -> Option<&Parts> {
        let before = self.state.compare_exchange(UNSENT, SENT, SeqCst, SeqCst);
        let may = before.is_ok() || (before == Err(SENT) && !self.once);
        may.then_some(&self.parts)
    }

    /// The bytes, for computing their length.
    pub(super) fn parts(&self) -> &Parts {
        &self.parts
    }
}

/// Bodies contain prompts, so their bytes are not shown.
impl fmt::Debug for RevocableBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut revocable = f.debug_struct("RevocableBody");
        revocable
            .field("is_unsent", &self.is_unsent())
            .field("once", &self.once)
            .finish_non_exhaustive()
    }
}

impl From<Bytes> for RevocableBody {
    fn from(bytes: Bytes) -> Self {
        Self::new(bytes).0
    }
}

impl From<Parts> for RevocableBody {
    fn from(parts: Parts) -> Self {
        Self::new(parts).0
    }
}

impl SendState {
    /// Takes the body back; `false` if it may have been sent. A body that was taken back is never
    /// sent.
    pub fn take_back(&self) -> bool {
        self.0.compare_exchange(UNSENT, TAKEN_BACK, SeqCst, SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: Bytes = Bytes::from_static(b"body");

    #[test]
    fn a_body_is_either_sent_or_taken_back() {
        let (revocable, send_state) = RevocableBody::new(BODY);
        assert_eq!(revocable.send().cloned().map(Parts::into_bytes), Some(BODY));
        assert!(!send_state.take_back());
        let (revocable, send_state) = RevocableBody::new(BODY);
        assert!(send_state.take_back());
        assert!(!send_state.take_back(), "it can be used once");
        assert!(revocable.send().is_none());
    }

    #[test]
    fn a_hand_off_is_sent_once_and_other_bodies_after_each_lost_connection() {
        let (revocable, _) = RevocableBody::new(BODY);
        assert!(revocable.send().is_some() && revocable.send().is_some());
        let (revocable, _) = RevocableBody::new(BODY);
        let revocable = revocable.once();
        assert!(revocable.send().is_some() && revocable.send().is_none());
    }

    #[test]
    fn a_body_shows_none_of_its_bytes() {
        let (revocable, _) = RevocableBody::new(BODY);
        let shown = format!("{revocable:?}");
        assert!(!shown.contains("body") && !shown.contains("98"), "{shown}");
    }
}
