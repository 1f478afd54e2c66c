//! Connections of shims: bounded in number, shared among addresses, and closed when no shim is
//! attached over them in time.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::Stream;
use futures_util::stream;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::Code;
use tonic::transport::server::Connected;

use super::context::AttachContext;
use super::tls::Certificates;
use splitrail_api::shares::{AddressPlace, AddressShares};

/// Maximum time between the opening of a connection and the first hello on it that is accepted. A
/// connection whose last stream has ended stays for once to twice this time.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure to accept, for example because no file descriptor is free.
const PAUSE: Duration = Duration::from_millis(100);

/// What is known of the client of a connection; each call on the connection gets a clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    streams: Arc<Streams>,
    /// The client's certificate, once the client has shown one that the configured authority
    /// signed.
    certificate: Arc<OnceLock<CertificateDer<'static>>>,
}

/// The streams of a connection whose hello was accepted.
#[derive(Debug, Default)]
struct Streams {
    open: AtomicUsize,
    /// Whether one was opened since the last call of `are_in_use`.
    were_opened: AtomicBool,
}

impl Streams {
    /// Whether a stream is open, or was opened since the last call.
    fn are_in_use(&self) -> bool {
        self.open.load(Relaxed) > 0 || self.were_opened.swap(false, Relaxed)
    }
}

/// An open stream of a connection, which is not closed before this value is dropped.
pub(super) struct OpenStream(Arc<Streams>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

impl Peer {
    /// Counts a stream whose hello was accepted.
    pub(super) fn open_stream(&self) -> OpenStream {
        self.streams.open.fetch_add(1, Relaxed);
        self.streams.were_opened.store(true, Relaxed);
        OpenStream(Arc::clone(&self.streams))
    }

    /// The certificate that the client has shown; `None` without TLS, or if the client showed none.
    pub(super) fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.certificate.get().cloned()
    }
}

/// A connection that is closed after `ATTACH_TIMEOUT` unless a shim attaches over it.
pub(super) struct Connection {
    io: Io,
    peer: Peer,
    deadline: Pin<Box<Sleep>>,
    _place: AddressPlace,
}

/// A byte stream in both directions: TCP or TLS.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

type Handshake = Pin<Box<dyn Future<Output = io::Result<TlsStream<TcpStream>>> + Send>>;

enum Io {
    /// The TLS handshake is in progress; each read or write drives it.
    Handshake(Handshake),
    Open(Box<dyn Duplex>),
    /// The handshake failed.
    Failed,
}

impl Io {
    fn new(stream: TcpStream, tls: Option<&Certificates>) -> Self {
        match tls {
            None => Self::Open(Box::new(stream)),
            Some(tls) => {
                let tls = tls.clone();
                Self::Handshake(Box::pin(async move {
                    TlsAcceptor::from(tls.current(Instant::now()).await).accept(stream).await
                }))
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
            let done = ready!(handshake.as_mut().poll(context));
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
        while (read.is_pending() || self.deadline.is_elapsed())
            && self.deadline.as_mut().poll(context).is_ready()
        {
            if !self.peer.streams.are_in_use() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.deadline.set(sleep(ATTACH_TIMEOUT));
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

/// Accepts connections.
pub(super) struct Acceptor {
    pub(super) listener: TcpListener,
    pub(super) context: Arc<AttachContext>,
    pub(super) tls: Option<Certificates>,
    /// The open connections by client address.
    pub(super) shares: Arc<AddressShares>,
    /// Maximum number of open connections.
    pub(super) connections_max: usize,
}

impl Acceptor {
    /// The accepted connections. Those of one address leave some for others; a connection beyond is
    /// closed at once. A failure to accept does not end the stream, and no connection waits for the
    /// handshake of another.
    pub(super) fn incoming(self) -> impl Stream<Item = io::Result<Connection>> {
        stream::unfold(self, async |acceptor| Some((acceptor.accept().await, acceptor)))
    }

    async fn accept(&self) -> io::Result<Connection> {
        loop {
            let (io, from) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    sleep(PAUSE).await;
                    return Err(error);
                }
            };
            let Some(place) = self.shares.take(from.ip(), self.connections_max, usize::MAX) else {
                self.context.count(Code::ResourceExhausted);
                continue;
            };
            // If the socket is already closed, the next read reports it.
            let _gone = io.set_nodelay(true);
            let (io, deadline) = (Io::new(io, self.tls.as_ref()), Box::pin(sleep(ATTACH_TIMEOUT)));
            return Ok(Connection { io, peer: Peer::default(), deadline, _place: place });
        }
    }
}
