//! One connection to an admin listener, or to another HTTP server.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::address::AdminAddress;
use super::ask_error::AskError;

/// Maximum size of the head of a reply in bytes.
const HEAD_MAX_BYTES: usize = 64 << 10;

/// A connection, with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// The part of a connection that reads and writes.
type ConnectionDriver = Connection<TokioIo<Box<dyn Stream>>, Full<Bytes>>;

/// An open connection that serves one request.
pub(super) struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    connection: Pin<Box<ConnectionDriver>>,
    is_open: bool,
}

/// Connects, and completes the TLS handshake if there is one.
///
/// # Errors
/// There is no connection; the message says why.
pub(super) async fn open(
    address: &AdminAddress,
    resolved: Option<SocketAddr>,
    tls: Option<&Arc<ClientConfig>>,
) -> Result<OpenConnection, AskError> {
    let connected = match resolved {
        Some(resolved) => TcpStream::connect(resolved).await,
        None => TcpStream::connect((address.host(), address.port())).await,
    };
    let plain = connected.map_err(|error| AskError::connect(address, &error))?;
    let stream: Box<dyn Stream> = match tls {
        None => Box::new(plain),
        Some(config) => {
            let name = ServerName::try_from(address.host().to_owned()).map_err(|_| {
                let what = "is not a name that a certificate can have";
                AskError::unreachable(format!("{} {what}", address.host()), None)
            })?;
            let connector = TlsConnector::from(Arc::clone(config));
            let secured = connector.connect(name, plain).await;
            Box::new(secured.map_err(|error| AskError::tls(address, &error))?)
        }
    };
    let mut builder = http1::Builder::new();
    builder.max_buf_size(HEAD_MAX_BYTES);
    let handshake = builder.handshake(TokioIo::new(stream)).await;
    let (sender, connection) = handshake.map_err(|error| AskError::exchange(address, &error))?;
    Ok(OpenConnection { sender, connection: Box::pin(connection), is_open: true })
}

impl OpenConnection {
    /// Sends the request, and returns the reply once its head has come.
    ///
    /// # Errors
    /// The connection broke, or what came is not HTTP.
    pub(super) async fn send(
        &mut self,
        address: &AdminAddress,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, AskError> {
        let Self { sender, connection, is_open } = self;
        let reply = served(connection, is_open, sender.send_request(request)).await;
        reply.map_err(|error| AskError::exchange(address, &error))
    }

    /// Serves the connection while `reading` reads from it.
    pub(super) async fn serve<T>(&mut self, reading: impl Future<Output = T>) -> T {
        served(&mut self.connection, &mut self.is_open, reading).await
    }
}

/// Serves a connection while something waits for what comes over it.
async fn served<T>(
    connection: &mut (impl Future + Unpin),
    is_open: &mut bool,
    reading: impl Future<Output = T>,
) -> T {
    let mut reading = pin!(reading);
    loop {
        tokio::select! {
            result = &mut reading => return result,
            // The reply may be complete in memory when the connection ends.
            _ended = &mut *connection, if *is_open => *is_open = false,
        }
    }
}
