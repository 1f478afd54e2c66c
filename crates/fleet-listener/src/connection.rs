//! Connections of shims: bounded in number, shared among addresses, and closed when no shim is
//! attached over them in time.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
use splitrail_config::tls::not_after_unix_s;
use splitrail_settings::address_shares::{AddressPlace, AddressShares};

/// Maximum time between the opening of a connection and the first hello on it that is accepted. A
/// connection whose last stream has ended stays for once to twice this time.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of times that `ATTACH_TIMEOUT` ends while one write waits for the peer to read, after which
/// the connection is closed. HTTP/2's keep-alive cannot do that: its last message would wait as well.
const UNREAD_MAX: u8 = 3;
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
    /// Has a reference for each open one.
    open: OpenStream,
    /// Whether one was opened since the last call of `are_in_use`.
    were_opened: AtomicBool,
}

impl Streams {
    /// Whether a stream is open, or was opened since the last call.
    fn are_in_use(&self) -> bool {
        Arc::strong_count(&self.open) > 1 || self.were_opened.swap(false, Relaxed)
    }
}

/// An open stream of a connection, which is not closed before this value is dropped.
pub(super) type OpenStream = Arc<()>;

impl Peer {
    /// Counts a stream whose hello was accepted.
    pub(super) fn open_stream(&self) -> OpenStream {
        self.streams.were_opened.store(true, Relaxed);
        Arc::clone(&self.streams.open)
    }

    /// The certificate that the client has shown; `None` without TLS, or if the client showed none.
    pub(super) fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.certificate.get().cloned()
    }

    /// Whether the client has shown a certificate that is no longer valid. One whose end cannot be
    /// read counts as expired.
    pub(super) fn has_expired(&self, now: SystemTime) -> bool {
        let now_unix_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.certificate.get().is_some_and(|certificate| {
            let not_after = not_after_unix_s(certificate).and_then(|end| u64::try_from(end).ok());
            not_after.is_none_or(|last| last < now_unix_s)
        })
    }
}

/// A connection that is closed in time if no shim is attached over it or its peer reads nothing.
pub(super) struct Connection {
    io: Io,
    peer: Peer,
    deadline: Pin<Box<Sleep>>,
    /// While a write waits for the peer, how often `deadline` has passed since.
    unread: Option<u8>,
    _place: AddressPlace,
}

/// A byte stream in both directions: TCP or TLS.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

type OpenIo<'a> = Pin<&'a mut (dyn Duplex + 'static)>;
type IoPoll<T> = Poll<io::Result<T>>;
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
    fn poll_open(&mut self, peer: &Peer, context: &mut Context<'_>) -> IoPoll<OpenIo<'_>> {
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
    /// Runs an operation on the open byte stream, or drives the handshake. Fails if the operation
    /// waits past the deadline: whichever direction is polled, since HTTP/2 may wait in one only.
    fn poll_io<T>(
        &mut self,
        context: &mut Context<'_>,
        operation: impl FnOnce(OpenIo<'_>, &mut Context<'_>) -> IoPoll<T>,
    ) -> IoPoll<T> {
        let done = match self.io.poll_open(&self.peer, context) {
            Poll::Ready(open) => operation(open?, context),
            Poll::Pending => Poll::Pending,
        };
        while (done.is_pending() || self.deadline.is_elapsed())
            && self.deadline.as_mut().poll(context).is_ready()
        {
            self.unread = self.unread.map(|times| times + 1);
            if !self.peer.streams.are_in_use() || self.unread >= Some(UNREAD_MAX) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.deadline.set(sleep(ATTACH_TIMEOUT));
        }
        done
    }

    /// The same for an operation that waits for the peer to read.
    fn poll_write_io<T>(
        &mut self,
        context: &mut Context<'_>,
        operation: impl FnOnce(OpenIo<'_>, &mut Context<'_>) -> IoPoll<T>,
    ) -> IoPoll<T> {
        let done = self.poll_io(context, operation);
        self.unread = if done.is_pending() { self.unread.or(Some(0)) } else { None };
        done
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
        self.poll_io(context, |open, context| open.poll_read(context, buffer))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_io(context, |open, context| open.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_write_io(context, AsyncWrite::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_write_io(context, AsyncWrite::poll_shutdown)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_io(context, |open, context| open.poll_write_vectored(context, bytes))
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
            let (peer, unread) = Default::default();
            return Ok(Connection { io, peer, deadline, unread, _place: place });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    /// A connection to a peer that reads nothing, which takes 64 bytes.
    fn unread() -> (Connection, impl Sized) {
        let (own, peer) = duplex(64);
        let shares: Arc<AddressShares> = Arc::default();
        let place = shares.take(Ipv4Addr::LOCALHOST.into(), 8, 8).unwrap();
        let connection = Connection {
            io: Io::Open(Box::new(own)),
            peer: Peer::default(),
            deadline: Box::pin(sleep(ATTACH_TIMEOUT)),
            unread: None,
            _place: place,
        };
        (connection, peer)
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_is_disconnected_whether_or_not_a_shim_is_attached() {
        for (is_attached, timeout) in [(false, ATTACH_TIMEOUT), (true, 3 * ATTACH_TIMEOUT)] {
            let (mut connection, _peer) = unread();
            let _stream = is_attached.then(|| connection.peer.open_stream());
            let began = tokio::time::Instant::now();
            let written = connection.write_all(&[0; 65]);
            let ended = tokio::time::timeout(Duration::from_secs(60), written).await.unwrap();
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
            let waited = began.elapsed();
            assert!(waited >= timeout && waited < timeout + PAUSE, "{is_attached} {waited:?}");
        }
    }
}
