//! A collector that receives spans over OTLP/gRPC and does not decode them.

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

/// Flow-control window of streams and connections, in bytes.
const WINDOW_BYTES: u32 = 4 << 20;

/// A running collector. It ends when it is dropped.
pub(super) struct Collector {
    address: SocketAddr,
    bytes: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Collector {
    /// Starts a collector.
    ///
    /// # Errors
    /// No port is free.
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
                    // The router may close the connection at any time.
                    let _closed = serve(stream, &received).await;
                });
            }
        });
        Ok(Self { address, bytes, _tasks: tasks })
    }

    /// The address of its listener.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of bytes of all messages so far.
    pub(super) fn received_bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

async fn serve(stream: TcpStream, received: &AtomicU64) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    let mut library = Builder::new();
    library.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let mut connection = library.handshake::<_, Bytes>(stream).await?;
    // There is one call at a time: a router sends the next message after the reply to the last.
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
        calls.spawn(async move { receive(request.into_body(), reply).await.unwrap_or(0) });
    }
}

/// Receives a message and replies to it. Returns the length of the message.
async fn receive(mut body: RecvStream, mut reply: SendResponse<Bytes>) -> Result<u64, h2::Error> {
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
