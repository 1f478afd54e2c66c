//! Connections that the engine can cut.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Accepts connections, all of which end with the engine.
pub(crate) struct CuttableListener {
    inner: TcpListener,
    all: CancellationToken,
}

impl CuttableListener {
    pub(crate) fn new(inner: TcpListener, all: CancellationToken) -> Self {
        Self { inner, all }
    }
}

impl Listener for CuttableListener {
    type Io = CuttableStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.inner.accept().await {
                Ok((stream, peer)) => {
                    let _ = stream.set_nodelay(true); // only speed is lost without it
                    let cut = self.all.child_token();
                    let is_cut = Box::pin(cut.clone().cancelled_owned());
                    let begins = Arc::default();
                    return (CuttableStream { stream, cut, is_cut, begins }, peer);
                }
                // Probably no file descriptor is free: tries again later.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// One connection.
pub(crate) struct CuttableStream {
    stream: TcpStream,
    cut: CancellationToken,
    is_cut: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Whether a reply begins before the connection is cut.
    begins: Arc<AtomicBool>,
}

impl CuttableStream {
    /// Fails once the connection is cut. The peer then sees a reset instead of an orderly end.
    fn check(&self) -> io::Result<()> {
        if self.cut.is_cancelled() {
            if self.begins.swap(false, Relaxed) {
                let _ = self.stream.try_write(b"HTTP/1.1 "); // the cut itself is what counts
            }
            let _ = self.stream.set_zero_linger(); // a plain close is the next best
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
}

impl AsyncRead for CuttableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Polled for its waker: a connection that waits for bytes must notice the cut.
        let _ = self.is_cut.as_mut().poll(context);
        self.check()?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CuttableStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Lets a handler cut the connection of its request.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionControl {
    cut: CancellationToken,
    begins: Arc<AtomicBool>,
}

impl ConnectionControl {
    /// Cuts the connection in the head of the reply. If it were cut before any byte of a reply, the
    /// connection would look as if it had ended before the request, and the request would be sent
    /// again.
    pub(crate) fn cut_in_head(&self) {
        self.begins.store(true, Relaxed);
        self.cut.cancel();
    }
}

impl Connected<IncomingStream<'_, CuttableListener>> for ConnectionControl {
    fn connect_info(stream: IncomingStream<'_, CuttableListener>) -> Self {
        let CuttableStream { cut, begins, .. } = stream.io();
        Self { cut: cut.clone(), begins: Arc::clone(begins) }
    }
}
