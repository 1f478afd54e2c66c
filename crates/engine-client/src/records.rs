//! A TCP connection that knows whether it was read up to the end of a TLS record.
//!
//! A record that has arrived in part may be one of the engine's replies or a message of TLS itself:
//! a connection in that state must not serve another request.

use std::io::{self, IoSlice, Read};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Length in bytes of the header of a record: type, version, length (RFC 8446, section 5.1).
const HEADER_BYTES: u8 = 5;

/// A TCP connection whose TLS records are counted as they are read.
#[derive(Debug)]
pub(super) struct Records {
    socket: TcpStream,
    progress: Progress,
}

/// How much of the current record has been read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    /// Number of bytes of the header, 0 to 4: with the fifth byte, the body begins.
    header_bytes: u8,
    /// The high byte of the length in the header.
    length_high: u8,
    /// Number of bytes of the body that are still to come.
    body_left: u16,
}

impl Progress {
    fn advance(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if self.body_left > 0 {
                let read = bytes.len().min(self.body_left.into());
                // `read` is at most `body_left`, which is a `u16`.
                self.body_left -= read as u16;
                bytes = &bytes[read..];
                continue;
            }
            bytes = rest;
            self.header_bytes += 1;
            if self.header_bytes == HEADER_BYTES - 1 {
                self.length_high = *first;
            } else if self.header_bytes == HEADER_BYTES {
                self.body_left = u16::from_be_bytes([self.length_high, *first]);
                self.header_bytes = 0;
            }
        }
    }

    fn is_between_records(self) -> bool {
        self.header_bytes == 0 && self.body_left == 0
    }
}

impl Records {
    /// Counts the records of a connection from which nothing was read yet.
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, progress: Progress::default() }
    }

    /// The connection below TLS.
    #[cfg(test)]
    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Whether all records that have begun to arrive were read completely.
    pub(super) fn is_between_records(&self) -> bool {
        self.progress.is_between_records()
    }
}

/// Reads what has arrived, without waiting. Asks the socket, because the runtime's readiness state
/// may be outdated.
impl Read for Records {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match recv(&self.socket, &mut *into, RecvFlags::DONTWAIT) {
            Ok((_, bytes)) => {
                self.progress.advance(&into[..bytes]);
                Ok(bytes)
            }
            Err(Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsyncRead for Records {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(context, into))?;
        self.progress.advance(&into.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Records {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).expect("a short body").to_be_bytes();
        [&[23, 3, 3], &length[..], body].concat()
    }

    proptest! {
        /// However the bytes are split into reads, only the ends of records are ends.
        #[test]
        fn only_the_end_of_a_record_is_between_records(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..5),
            step in 1_usize..40,
        ) {
            let (mut bytes, mut ends) = (Vec::new(), vec![0]);
            for body in &bodies {
                bytes.extend(record(body));
                ends.push(bytes.len());
            }
            let (mut progress, mut read) = (Progress::default(), 0);
            for piece in bytes.chunks(step) {
                progress.advance(piece);
                read += piece.len();
                prop_assert_eq!(progress.is_between_records(), ends.contains(&read));
            }
        }
    }
}
