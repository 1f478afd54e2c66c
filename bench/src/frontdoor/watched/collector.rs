//! A collector that takes all spans over OTLP/gRPC and looks at none of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Builder, SendResponse};
use http::{HeaderMap, HeaderValue, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::Failure;

/// What routers may send ahead.
const WINDOW_BYTES: u32 = 4 << 20;

/// A running collector; it ends when this is dropped.
pub(super) struct Collector {
    address: SocketAddr,
    bytes: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Collector {
    /// Starts one.
    ///
    /// # Errors
    /// A port that cannot be had.
    pub(super) async fn start() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let bytes = Arc::<AtomicU64>::default();
        let received = Arc::clone(&bytes);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let received = Arc::clone(&received);
                connections.spawn(async move {
                    // A router may leave at any time.
                    let _gone = serve(stream, &received).await;
                });
            }
        });
        Ok(Self { address, bytes, _tasks: tasks })
    }

    /// Where it serves.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes of messages so far.
    pub(super) fn received_bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

async fn serve(stream: TcpStream, received: &AtomicU64) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    let mut library = Builder::new();
    library.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let mut connection = library.handshake::<_, Bytes>(stream).await?;
    // A router sends one message after the other.
    let mut calls = JoinSet::new();
    loop {
        let call = tokio::select! {
            call = connection.accept() => call,
            Some(ended) = calls.join_next() => {
                received.fetch_add(ended?, Relaxed);
                continue;
            }
        };
        let Some(call) = call else { return Ok(()) };
        let (request, reply) = call?;
        calls.spawn(async move { take(request.into_body(), reply).await.unwrap_or(0) });
    }
}

/// Takes a message; returns its length.
async fn take(mut body: RecvStream, mut reply: SendResponse<Bytes>) -> Result<u64, h2::Error> {
    let mut length = 0;
    while let Some(part) = body.data().await {
        let part = part?;
        length += part.len() as u64;
        body.flow_control().release_capacity(part.len())?;
    }
    let mut head = Response::new(());
    head.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    let mut stream = reply.send_response(head, false)?;
    // An empty `ExportTraceServiceResponse`.
    stream.send_data(Bytes::from_static(&[0; 5]), false)?;
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    stream.send_trailers(trailers)?;
    Ok(length)
}
