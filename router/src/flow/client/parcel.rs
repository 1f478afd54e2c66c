//! A request's body that knows whether it was sent.
//!
//! A hand-off that an engine may have received is spent. One whose request waited in vain
//! for a connection, or was dropped before, is not: no byte of its body was written.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, SizeHint};

use crate::api::Parts;

const HERE: u8 = 0;
const SENT: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// A body on its way.
#[derive(Debug)]
pub struct Parcel {
    bytes: Full<Parts>,
    state: Arc<AtomicU8>,
}

/// What its sender keeps of a [`Parcel`].
#[derive(Clone, Debug)]
pub struct Receipt(Arc<AtomicU8>);

impl Parcel {
    /// A body, and its sender's receipt.
    pub fn new(bytes: impl Into<Parts>) -> (Self, Receipt) {
        let state = Arc::new(AtomicU8::new(HERE));
        (Self { bytes: Full::new(bytes.into()), state: Arc::clone(&state) }, Receipt(state))
    }
}

impl From<Bytes> for Parcel {
    fn from(bytes: Bytes) -> Self {
        Self::new(bytes).0
    }
}

impl From<Parts> for Parcel {
    fn from(bytes: Parts) -> Self {
        Self::new(bytes).0
    }
}

impl Receipt {
    /// Takes the body back; `false` if it may have been sent. Once it is taken back, it is
    /// never sent, whatever holds it.
    pub fn take_back(&self) -> bool {
        self.0.compare_exchange(HERE, TAKEN_BACK, SeqCst, SeqCst).is_ok()
    }
}

impl Body for Parcel {
    type Data = Parts;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Parts>, io::Error>>> {
        // Asked for its bytes by a connection that is going to write them.
        if self.state.compare_exchange(HERE, SENT, SeqCst, SeqCst) == Err(TAKEN_BACK) {
            return Poll::Ready(Some(Err(io::ErrorKind::ConnectionAborted.into())));
        }
        Pin::new(&mut self.bytes).poll_frame(context).map_err(|never| match never {})
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.bytes.size_hint()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn what_was_sent_cannot_be_taken_back_nor_the_other_way_round() {
        let (parcel, receipt) = Parcel::new(Bytes::from_static(b"x"));
        assert_eq!(parcel.collect().await.unwrap().to_bytes(), "x");
        assert!(!receipt.take_back());
        let (parcel, receipt) = Parcel::new(Bytes::from_static(b"x"));
        assert!(receipt.take_back());
        assert!(!receipt.take_back(), "it can be used once");
        assert!(parcel.collect().await.is_err());
    }
}
