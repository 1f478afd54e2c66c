//! Connections of shims: bounded in number, and closed when they do not authenticate in time.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::Stream;
use futures_util::stream;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tokio_rustls::{Accept, TlsAcceptor};
use tonic::transport::server::Connected;

use super::tls::Certificates;

/// Maximum time between the opening of a connection and its first authenticated call.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure to accept, for example because no file descriptor is free.
const PAUSE: Duration = Duration::from_millis(100);

/// What is known of the client of a connection; each call on the connection gets a clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    authenticated: Arc<AtomicBool>,
    /// The client's certificate, once the client has shown one that the configured authority
    /// signed.
    certificate: Arc<OnceLock<CertificateDer<'static>>>,
}

impl Peer {
    /// Marks the connection as authenticated, so that it is not closed after
    /// `AUTHENTICATION_TIMEOUT`.
    pub(super) fn mark_authenticated(&self) {
        self.authenticated.store(true, Relaxed);
    }

    /// The certificate that the client has shown; `None` without TLS, or if the client showed none.
    pub(super) fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.certificate.get().cloned()
    }
}

/// A connection that is closed after `AUTHENTICATION_TIMEOUT` unless a call on it authenticates.
pub(super) struct Connection {
    io: Io,
    peer: Peer,
    deadline: Pin<Box<Sleep>>,
    _room: OwnedSemaphorePermit,
}

/// A byte stream in both directions: TCP or TLS.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

enum Io {
    /// The TLS handshake is in progress; each read or write drives it.
    Handshake(Box<Accept<TcpStream>>),
    Open(Box<dyn Duplex>),
    /// The handshake failed.
    Failed,
}

impl Io {
    fn new(stream: TcpStream, tls: Option<&Certificates>) -> Self {
        match tls {
            None => Self::Open(Box::new(stream)),
            Some(tls) => {
                let acceptor = TlsAcceptor::from(tls.current(Instant::now()));
                Self::Handshake(Box::new(acceptor.accept(stream)))
            }
        }
    }

    /// Returns the open byte stream once the handshake is complete.
    fn poll_open(
        &mut self,
        peer: &Peer,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut (dyn Duplex + 'static)>>> {
        if let Self::Handshake(handshake) = self {
            let done = ready!(Pin::new(&mut **handshake).poll(context));
            *self = Self::Failed;
            let open = done?;
            let shown = open.get_ref().1.peer_certificates();
            if let Some(certificate) = shown.and_then(<[_]>::first) {
                peer.certificate.get_or_init(|| certificate.clone().into_owned());
            }
            *self = Self::Open(Box::new(open));
        }
        match self {
            Self::Open(open) => Poll::Ready(Ok(Pin::new(&mut **open))),
            _ => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl Connection {
    fn open(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut (dyn Duplex + 'static)>>> {
        self.io.poll_open(&self.peer, context)
    }
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
        let read = match self.open(context) {
            Poll::Ready(open) => open?.poll_read(context, buffer),
            Poll::Pending => Poll::Pending,
        };
        if read.is_pending() && !self.deadline.is_elapsed() {
            ready!(self.deadline.as_mut().poll(context));
        }
        if self.deadline.is_elapsed() && !self.peer.authenticated.load(Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.get_mut().open(context))?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.get_mut().open(context))?.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.get_mut().open(context))?.poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.get_mut().open(context))?.poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        matches!(&self.io, Io::Open(open) if open.is_write_vectored())
    }
}

/// The accepted connections, of which at most `connections_max` are open at the same time. A
/// failure to accept does not end the stream, and no connection waits for the handshake of another.
pub(super) fn incoming(
    listener: TcpListener,
    connections_max: usize,
    tls: Option<Certificates>,
) -> impl Stream<Item = io::Result<Connection>> {
    let room = Arc::new(Semaphore::new(connections_max));
    stream::unfold((listener, room, tls), async |(listener, room, tls)| {
        // The semaphore is never closed.
        let permit = Arc::clone(&room).acquire_owned().await.ok()?;
        let accepted = listener.accept().await;
        let connection = match accepted {
            Ok((io, _)) => {
                // If the socket is already closed, the next read reports it.
                let _gone = io.set_nodelay(true);
                let (io, deadline) =
                    (Io::new(io, tls.as_ref()), Box::pin(sleep(AUTHENTICATION_TIMEOUT)));
                Ok(Connection { io, peer: Peer::default(), deadline, _room: permit })
            }
            Err(error) => {
                sleep(PAUSE).await;
                Err(error)
            }
        };
        Some((connection, (listener, room, tls)))
    })
}
