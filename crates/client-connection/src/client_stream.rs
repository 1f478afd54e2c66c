//! The byte stream of a client, with or without TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

use crate::recorded_socket::RecordedSocket;

/// The byte stream of a client.
pub enum ClientStream {
    /// Without TLS.
    Plain(RecordedSocket),
    /// With TLS.
    // Boxed so that connections without TLS do not grow to the size of a TLS session.
    Tls(Box<TlsStream<RecordedSocket>>),
}

impl ClientStream {
    /// The socket, below TLS.
    pub fn socket(&mut self) -> &mut RecordedSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(session) => session.get_mut().0,
        }
    }
}

/// Calls a method of the stream that there is.
macro_rules! delegate {
    ($stream:expr, $method:ident($($argument:expr),*)) => {
        match $stream.get_mut() {
            ClientStream::Plain(socket) => Pin::new(socket).$method($($argument),*),
            ClientStream::Tls(session) => Pin::new(&mut **session).$method($($argument),*),
        }
    };
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        delegate!(self, poll_read(context, into))
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(socket) => socket.is_write_vectored(),
            Self::Tls(session) => session.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, poll_flush(context))
    }

    /// With TLS, the client is sent `close_notify` before the end of the socket's bytes.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, poll_shutdown(context))
    }
}
