//! The bytes of a connection to an engine, with or without TLS.

use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::net::{RecvFlags, recv};
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::records::Records;
use crate::tls::tls_cause;

/// Maximum number of bytes of TLS messages that are read between two requests. Two session tickets
/// of an engine take less than 1 KiB.
const BETWEEN_MAX_BYTES: usize = 32 << 10;

/// A connection's stream of bytes.
pub(super) enum Stream {
    Plain(TcpStream),
    // Boxed so that connections without TLS do not grow to the size of those with TLS.
    Tls(Box<SecureStream>),
}

/// A stream over TLS.
pub(super) struct SecureStream {
    stream: TlsStream<Records>,
    /// The alert with which the engine ended the connection.
    alert: Option<AlertDescription>,
}

/// What has arrived on a connection since its last reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArrivedData {
    Nothing,
    Bytes,
    /// The connection has ended or failed, or cannot be used for another reason.
    End,
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Self {
        Self::Plain(socket)
    }
}

impl Stream {
    /// A connection whose handshake has succeeded.
    pub(super) fn secured(stream: TlsStream<Records>) -> Self {
        Self::Tls(Box::new(SecureStream { stream, alert: None }))
    }

    /// What has arrived since the last reply. Asks the socket, because the runtime's readiness
    /// state may be outdated.
    pub(super) fn arrived(&mut self) -> ArrivedData {
        match self {
            Self::Plain(socket) => arrived(socket),
            Self::Tls(secured) => secured.arrived(),
        }
    }

    /// The alert of TLS with which the engine ended the connection.
    pub(super) fn alert(&self) -> Option<AlertDescription> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(secured) => secured.alert,
        }
    }
}

/// The address of the other end of a connection, if known.
pub(super) fn peer(socket: &TcpStream) -> Option<IpAddr> {
    socket.peer_addr().ok().map(|address| address.ip())
}

fn arrived(socket: &TcpStream) -> ArrivedData {
    match recv(socket, &mut [0; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 1..)) => ArrivedData::Bytes,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => ArrivedData::Nothing,
        Ok(_) | Err(_) => ArrivedData::End,
    }
}

impl SecureStream {
    /// Reads the records that have arrived. Messages of TLS itself, such as a session ticket after
    /// the handshake or a new key (RFC 8446, section 4.6), are no bytes of a reply: the connection
    /// stays usable. It is not usable after the engine's `close_notify`, even if TCP is still
    /// connected, and not in the middle of a record, because the record may begin a reply.
    fn arrived(&mut self) -> ArrivedData {
        let (records, session) = self.stream.get_mut();
        let mut read = 0;
        loop {
            match session.process_new_packets() {
                Ok(state) if state.plaintext_bytes_to_read() > 0 => return ArrivedData::Bytes,
                Ok(state) if state.peer_has_closed() => return ArrivedData::End,
                Ok(_) => {}
                Err(_) => return ArrivedData::End,
            }
            match session.read_tls(records) {
                Ok(0) => return ArrivedData::End,
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return ArrivedData::End,
            }
            if read > BETWEEN_MAX_BYTES {
                return ArrivedData::End;
            }
        }
        if records.is_between_records() { ArrivedData::Nothing } else { ArrivedData::End }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(context, into),
            Self::Tls(secured) => {
                let SecureStream { stream, alert } = &mut **secured;
                let read = Pin::new(stream).poll_read(context, into);
                if let Poll::Ready(Err(error)) = &read
                    && let Some(rustls::Error::AlertReceived(received)) = tls_cause(error)
                {
                    *alert = Some(*received);
                }
                read
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(context, bytes),
            Self::Tls(secured) => Pin::new(&mut secured.stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write_vectored(context, slices),
            Self::Tls(secured) => {
                Pin::new(&mut secured.stream).poll_write_vectored(context, slices)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            // The kernel sends what it was given.
            Self::Plain(_) => Poll::Ready(Ok(())),
            Self::Tls(secured) => Pin::new(&mut secured.stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(context),
            Self::Tls(secured) => Pin::new(&mut secured.stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
