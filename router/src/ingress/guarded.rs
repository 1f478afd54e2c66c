//! A client's socket: received bytes pass [`Wire`], and progress is recorded
//! in the connection's [`Pulse`].

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::pulse::{Cut, Pulse};
use super::wire::{PREFACE, Position, Protocol, Wire};

/// The socket.
pub(super) struct Guarded {
    socket: TcpStream,
    pulse: Arc<Pulse>,
    wire: Wire,
    /// What is read in place of what did not pass; then the end.
    poison: Option<&'static [u8]>,
    refused: Arc<RefusedFor>,
    /// What was read to know the protocol: how much of it there is, and has been read again.
    first: [u8; PREFACE.len()],
    first_bytes: usize,
    read_again: usize,
}

/// Why nothing more passes, once that is so.
#[derive(Debug, Default)]
pub(super) struct RefusedFor(std::sync::OnceLock<Cut>);

impl RefusedFor {
    pub(super) fn get(&self) -> Option<Cut> {
        self.0.get().copied()
    }
}

impl Guarded {
    pub(super) fn new(socket: TcpStream, pulse: Arc<Pulse>, refused: Arc<RefusedFor>) -> Self {
        let (wire, first) = (Wire::new(), [0; PREFACE.len()]);
        Self { socket, pulse, wire, poison: None, refused, first, first_bytes: 0, read_again: 0 }
    }

    /// Reads until it is clear which protocol the client speaks; `None` if it leaves before.
    /// What was read is read again by whoever reads next.
    ///
    /// # Errors
    /// The socket's.
    pub(super) async fn protocol(&mut self) -> io::Result<Option<Protocol>> {
        let mut first = self.first;
        let mut bytes = 0;
        let protocol = loop {
            match self.read(&mut first[bytes..]).await? {
                0 => return Ok(None),
                more => bytes += more,
            }
            if let Some(protocol) = self.wire.protocol() {
                break protocol;
            }
        };
        (self.first, self.first_bytes) = (first, bytes);
        Ok(Some(protocol))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.read_again < this.first_bytes {
            let rest = &this.first[this.read_again..this.first_bytes];
            let taken = &rest[..rest.len().min(into.remaining())];
            into.put_slice(taken);
            this.read_again += taken.len();
            return Poll::Ready(Ok(()));
        }
        if this.poison.is_none() {
            let before = into.filled().len();
            ready!(Pin::new(&mut this.socket).poll_read(context, into))?;
            let passed = this.wire.feed(&into.filled()[before..], Instant::now);
            this.pulse.reads(this.wire.position() == Position::Head, this.wire.heads());
            let Err(refusal) = passed else { return Poll::Ready(Ok(())) };
            into.set_filled(before + refusal.good_bytes);
            this.poison = Some(this.wire.poison());
            // It is set here alone, and once.
            let _first = this.refused.0.set(refusal.offence.into());
            if refusal.good_bytes > 0 {
                return Poll::Ready(Ok(()));
            }
        }
        if let Some(poison) = &mut this.poison {
            let (now, later) = poison.split_at(poison.len().min(into.remaining()));
            into.put_slice(now);
            *poison = later;
        }
        Poll::Ready(Ok(()))
    }
}

impl Guarded {
    fn wrote(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(bytes)) => self.pulse.wrote(*bytes),
            Poll::Ready(Err(_)) => {}
            Poll::Pending => self.pulse.blocked(),
        }
        written
    }
}

impl AsyncWrite for Guarded {
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
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if self.pulse.discards() {
            // Else the system would go on offering it what it does not read.
            let _gone = self.socket.set_zero_linger();
        }
    }
}
