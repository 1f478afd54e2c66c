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

/// How long a connection may last before somebody has proven who they are.
const PROOF: Duration = Duration::from_secs(10);
/// After a failure to accept, for lack of files say.
const PAUSE: Duration = Duration::from_millis(100);

/// What a call learns of its connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    proven: Arc<AtomicBool>,
    /// Its certificate, once it has shown one that an authority vouches for.
    certificate: Arc<OnceLock<CertificateDer<'static>>>,
}

impl Peer {
    /// Somebody at the other end has proven who they are.
    pub(super) fn prove(&self) {
        self.proven.store(true, Relaxed);
    }

    /// The certificate that the other end has shown; none without TLS, or if none was asked for.
    pub(super) fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.certificate.get().cloned()
    }
}

/// A connection, which ends unless somebody proves who they are.
pub(super) struct Connection {
    io: Io,
    peer: Peer,
    proof: Pin<Box<Sleep>>,
    _room: OwnedSemaphorePermit,
}

/// What bytes pass through.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

enum Io {
    /// The two ends agree on keys; whoever reads or writes first moves that on.
    Greeting(Box<Accept<TcpStream>>),
    Open(Box<dyn Duplex>),
    /// They did not agree.
    Failed,
}

impl Io {
    fn new(stream: TcpStream, tls: Option<&Certificates>) -> Self {
        match tls {
            None => Self::Open(Box::new(stream)),
            Some(tls) => {
                let acceptor = TlsAcceptor::from(tls.current(Instant::now()));
                Self::Greeting(Box::new(acceptor.accept(stream)))
            }
        }
    }

    /// The open connection, once it is.
    fn poll_open(
        &mut self,
        peer: &Peer,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Pin<&mut (dyn Duplex + 'static)>>> {
        if let Self::Greeting(greeting) = self {
            let greeted = ready!(Pin::new(&mut **greeting).poll(context));
            *self = Self::Failed;
            let open = greeted?;
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

/// The connections that a listener accepts, no more than so many at once. No failure ends it,
/// and nobody waits for another's greeting.
pub(super) fn incoming(
    listener: TcpListener,
    connections_max: usize,
    tls: Option<Certificates>,
) -> impl Stream<Item = io::Result<Connection>> {
    let room = Arc::new(Semaphore::new(connections_max));
    stream::unfold((listener, room, tls), async |(listener, room, tls)| {
        // Nobody closes it.
        let permit = Arc::clone(&room).acquire_owned().await.ok()?;
        let accepted = listener.accept().await;
        let connection = match accepted {
            Ok((io, _)) => {
                // A socket that is already gone is found out by the next read.
                let _gone = io.set_nodelay(true);
                let (io, proof) = (Io::new(io, tls.as_ref()), Box::pin(sleep(PROOF)));
                Ok(Connection { io, peer: Peer::default(), proof, _room: permit })
            }
            Err(error) => {
                sleep(PAUSE).await;
                Err(error)
            }
        };
        Some((connection, (listener, room, tls)))
    })
}
