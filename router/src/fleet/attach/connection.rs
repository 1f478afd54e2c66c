//! Connections of side-cars: bounded in number, and none for long that proves nothing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;

/// How long a connection may last before somebody has proven who they are.
pub(super) const PROOF: Duration = Duration::from_secs(10);
/// After a failure to accept, for lack of files say.
const PAUSE: Duration = Duration::from_millis(100);

/// What a call learns of its connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    proven: Arc<AtomicBool>,
}

impl Peer {
    /// Somebody at the other end has proven who they are.
    pub(super) fn prove(&self) {
        self.proven.store(true, Relaxed);
    }
}

/// A connection, which ends unless somebody proves who they are.
pub(super) struct Connection {
    io: TcpStream,
    peer: Peer,
    proof: Pin<Box<Sleep>>,
    _room: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_pending() && !self.proof.is_elapsed() {
            ready!(self.proof.as_mut().poll(context));
        }
        if self.proof.is_elapsed() && !self.peer.proven.load(Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// The connections that a listener accepts, no more than so many at once. No failure ends it.
pub(super) fn incoming(
    listener: TcpListener,
    connections_max: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let room = Arc::new(Semaphore::new(connections_max));
    stream::unfold((listener, room), async |(listener, room)| {
        // Nobody closes it.
        let permit = Arc::clone(&room).acquire_owned().await.ok()?;
        let accepted = listener.accept().await;
        let connection = match accepted {
            Ok((io, _)) => {
                // A socket that is already gone is found out by the next read.
                let _gone = io.set_nodelay(true);
                let proof = Box::pin(sleep(PROOF));
                Ok(Connection { io, peer: Peer::default(), proof, _room: permit })
            }
            Err(error) => {
                sleep(PAUSE).await;
                Err(error)
            }
        };
        Some((connection, (listener, room)))
    })
}
