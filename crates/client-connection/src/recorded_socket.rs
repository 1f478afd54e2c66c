//! A client's TCP socket, whose writes are recorded in the connection's [`ConnectionActivity`].
//!
//! They are recorded below TLS, because the TLS library accepts up to 64 KiB that the client has
//! not taken.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::connection_activity::ConnectionActivity;

/// The socket of a client.
pub struct RecordedSocket {
    socket: TcpStream,
    activity: Arc<ConnectionActivity>,
}

impl RecordedSocket {
    /// A socket whose bytes are counted.
    pub fn new(socket: TcpStream, activity: Arc<ConnectionActivity>) -> Self {
        Self { socket, activity }
    }

    /// Waits for the first byte, which remains to be read; `None` if the client disconnects before.
    ///
    /// # Errors
    /// An error of the socket.
    pub async fn peek(&self) -> io::Result<Option<u8>> {
        let mut first = [0];
        let bytes = self.socket.peek(&mut first).await?;
        Ok((bytes > 0).then_some(first[0]))
    }

    /// Whether the client has closed its side or the connection, although bytes may remain to be
    /// read. It is enough to look at what the system has reported already.
    fn has_ended(&self) -> bool {
        let ready = self.socket.ready(Interest::READABLE).now_or_never();
        ready.is_some_and(|ready| ready.is_ok_and(|ready| ready.is_read_closed()))
    }

    fn wrote(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(bytes)) => self.activity.wrote(*bytes),
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.activity.blocked(),
        }
        written
    }
}

impl AsyncRead for RecordedSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(context, into)
    }
}

impl AsyncWrite for RecordedSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.socket).poll_write(context, bytes);
        this.wrote(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.socket).poll_write_vectored(context, bytes);
        this.wrote(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // The library flushes each time the connection is polled.
        if this.activity.checks_for_end() && this.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut this.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

impl Drop for RecordedSocket {
    fn drop(&mut self) {
        if self.activity.discards() {
            // Otherwise the kernel would continue to offer the client what it does not read.
            let _gone = self.socket.set_zero_linger();
        }
    }
}
