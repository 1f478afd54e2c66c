//! The rest of a request that was answered before it was read to its end.
//!
//! A socket that is closed while it has unread bytes is reset, and a client that still sends may
//! then lose the reply. So after the reply, the client's bytes are read and discarded until the
//! client closes the connection, within bounds; RFC 9112, section 9.6.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Maximum number of bytes that are discarded: clients send up to 60 MB of images.
const REST_MAX_BYTES: usize = 64 << 20;

/// Maximum time for which bytes are discarded.
const REST_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time without a byte.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of bytes that are read at once.
const PIECE_BYTES: usize = 16 << 10;

/// Reads and discards bytes.
pub struct UnreadRest {
    bytes: usize,
    ends_at: Instant,
    timer: Pin<Box<Sleep>>,
}

impl UnreadRest {
    /// The rest that the client may send from now on.
    pub fn begin() -> Self {
        let now = Instant::now();
        let timer = Box::pin(sleep_until(now + SILENCE_TIMEOUT));
        Self { bytes: 0, ends_at: now + REST_TIMEOUT, timer }
    }

    /// Discards what the client sends, until it has closed its side or a bound is reached.
    pub fn poll_discard(
        &mut self,
        mut client: Pin<&mut impl AsyncRead>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let mut buffer = [MaybeUninit::uninit(); PIECE_BYTES];
        let before = self.bytes;
        loop {
            let mut piece = ReadBuf::uninit(&mut buffer);
            match client.as_mut().poll_read(context, &mut piece) {
                Poll::Ready(Ok(())) if !piece.filled().is_empty() => {
                    self.bytes += piece.filled().len();
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => break,
            }
            if self.bytes >= REST_MAX_BYTES {
                return Poll::Ready(());
            }
        }
        if self.bytes > before {
            let silent_at = Instant::now() + SILENCE_TIMEOUT;
            self.timer.as_mut().reset(silent_at.min(self.ends_at));
        }
        self.timer.as_mut().poll(context)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Discards what the client sends; the number of bytes and the time.
    async fn discarded(mut client: impl AsyncRead + Unpin) -> (usize, Duration) {
        let began = Instant::now();
        let mut rest = UnreadRest::begin();
        poll_fn(|context| rest.poll_discard(Pin::new(&mut client), context)).await;
        (rest.bytes, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn the_rest_of_a_request_is_read_until_its_client_closes() {
        let (mut client, router) = tokio::io::duplex(1 << 10);
        let sends = async {
            client.write_all(&[0; 100_000]).await.unwrap();
            drop(client);
        };
        let ((bytes, time), ()) = tokio::join!(discarded(router), sends);
        assert_eq!((bytes, time), (100_000, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_neither_sends_nor_closes_is_given_up() {
        let (_client, router) = tokio::io::duplex(1 << 10);
        let (bytes, time) = discarded(router).await;
        assert_eq!(bytes, 0);
        assert!(time >= SILENCE_TIMEOUT && time < SILENCE_TIMEOUT * 2, "{time:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_slowly_is_given_up() {
        let (mut client, router) = tokio::io::duplex(1 << 10);
        let sends = async {
            while client.write_all(&[0]).await.is_ok() {
                tokio::time::sleep(SILENCE_TIMEOUT / 2).await;
            }
        };
        let ((bytes, time), ()) = tokio::join!(discarded(router), sends);
        assert!((12..14).contains(&bytes), "{bytes}");
        assert!(time >= REST_TIMEOUT && time < REST_TIMEOUT * 2, "{time:?}");
    }

    #[tokio::test]
    async fn a_client_that_sends_without_end_is_given_up() {
        let (bytes, _) = discarded(tokio::io::repeat(0).take(1 << 40)).await;
        assert!((REST_MAX_BYTES..REST_MAX_BYTES + PIECE_BYTES).contains(&bytes), "{bytes}");
    }
}
