//! Connections to engines, kept for the next request.
//!
//! A connection has no task of its own: whoever waits for an answer moves it along. That
//! spares each leg four changes of tasks, and dropping the answer closes the connection,
//! which is how an engine learns that nobody wants it any more.

use std::collections::VecDeque;
use std::error::Error as StdError;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dashmap::DashMap;
use http::header::{HOST, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower::ServiceExt;

use super::guarded::Resolver;
use super::parcel::Parcel;

/// Bytes that are read of an engine's answer before anybody asks for them, on one connection: what
/// a client that is slower than its engine may have waiting.
const READ_AHEAD_BYTES: usize = 32 << 10;

/// vLLM closes idle connections after 5 s. Ours end earlier, so that a request is
/// never written to a connection that is just being closed: a hand-off that may
/// have been received cannot be sent again.
const IDLE: Duration = Duration::from_secs(3);
/// Idle connections to one engine; more are closed.
const IDLE_MAX: usize = 1024;

/// The connections to a model's engines.
pub(super) struct Connections {
    connector: HttpConnector<Resolver>,
    idle: DashMap<Authority, Idle>,
}

/// Idle connections to one engine, each with since when: the longest idle first.
type Idle = VecDeque<(Instant, Box<Wire>)>;

/// Why a request got no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no connection.
    Connect(Box<dyn StdError + Send + Sync>),
    /// There was one, and it broke.
    Broken,
}

/// Who has answered, where that is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// A connection and what moves it along; that is gone once the connection is closed.
struct Wire {
    sender: SendRequest<Parcel>,
    driver: Option<Connection<TokioIo<TcpStream>, Parcel>>,
    peer: Option<Peer>,
}

impl Wire {
    fn drive(&mut self, context: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && Pin::new(driver).poll(context).is_ready()
        {
            self.driver = None;
        }
    }

    /// Whether a request can be sent at once.
    fn is_ready(&mut self, context: &mut Context<'_>) -> bool {
        // An engine that has hung up is found out here.
        self.drive(context);
        self.driver.is_some() && matches!(self.sender.poll_ready(context), Poll::Ready(Ok(())))
    }
}

impl Connections {
    /// None yet.
    pub(super) fn new(connector: HttpConnector<Resolver>) -> Arc<Self> {
        Arc::new(Self { connector, idle: DashMap::new() })
    }

    /// Sends a request, on an idle connection if there is one.
    ///
    /// # Errors
    /// If no answer begins.
    pub(super) async fn request(
        self: &Arc<Self>,
        authority: &Authority,
        mut request: Request<Parcel>,
    ) -> Result<Response<EngineBody>, Failure> {
        // Authorities have no bytes that headers may not have.
        if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
            request.headers_mut().insert(HOST, host);
        }
        loop {
            let idle = self.check_out(authority).await;
            let was_idle = idle.is_some();
            let mut wire = match idle {
                Some(wire) => wire,
                None => self.connect(authority).await?,
            };
            let mut sending = pin!(wire.sender.try_send_request(request));
            let answer = poll_fn(|context| {
                wire.drive(context);
                sending.as_mut().poll(context)
            });
            match answer.await {
                Ok(mut response) => {
                    if let Some(peer) = wire.peer {
                        response.extensions_mut().insert(peer);
                    }
                    let way_back = Some((wire, Arc::clone(self), authority.clone()));
                    return Ok(response.map(|body| EngineBody { body, way_back }));
                }
                // It was closed before anything was written to it.
                Err(mut error) => match error.take_message().filter(|_| was_idle) {
                    Some(unsent) => request = unsent,
                    None => return Err(Failure::Broken),
                },
            }
        }
    }

    async fn check_out(&self, authority: &Authority) -> Option<Box<Wire>> {
        loop {
            let mut wire = {
                let mut idle = self.idle.get_mut(authority)?;
                forget_old(&mut idle);
                idle.pop_back()?.1
            };
            if poll_fn(|context| Poll::Ready(wire.is_ready(context))).await {
                return Some(wire);
            }
        }
    }

    fn check_in(&self, authority: Authority, wire: Box<Wire>) {
        let mut idle = self.idle.entry(authority).or_default();
        forget_old(&mut idle);
        if idle.len() < IDLE_MAX {
            idle.push_back((Instant::now(), wire));
        }
    }

    async fn connect(&self, authority: &Authority) -> Result<Box<Wire>, Failure> {
        // Connections to engines that are gone go as well.
        self.idle.retain(|_, idle| {
            forget_old(idle);
            !idle.is_empty()
        });
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority.clone());
        let uri = uri.path_and_query(PathAndQuery::from_static("/")).build();
        let uri = uri.map_err(|error| Failure::Connect(error.into()))?;
        let stream = self.connector.clone().oneshot(uri).await;
        let stream = stream.map_err(|error| Failure::Connect(error.into()))?;
        let peer = stream.inner().peer_addr().ok().map(|address| Peer(address.ip()));
        let mut builder = Builder::new();
        builder.max_buf_size(READ_AHEAD_BYTES);
        let joined = builder.handshake(stream).await;
        let (sender, driver) = joined.map_err(|error| Failure::Connect(error.into()))?;
        Ok(Box::new(Wire { sender, driver: Some(driver), peer }))
    }
}

fn forget_old(idle: &mut Idle) {
    while idle.front().is_some_and(|(since, _)| since.elapsed() > IDLE) {
        idle.pop_front();
    }
}

/// An engine's answer. Read to its end, its connection serves another request; dropped
/// before, the connection is closed.
pub struct EngineBody {
    body: Incoming,
    way_back: Option<(Box<Wire>, Arc<Connections>, Authority)>,
}

impl EngineBody {
    fn give_back(&mut self) {
        if let Some((wire, connections, authority)) = self.way_back.take()
            && wire.driver.is_some()
        {
            connections.check_in(authority, wire);
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let mut frame = Pin::new(&mut this.body).poll_frame(context);
        if frame.is_pending()
            && let Some((wire, ..)) = &mut this.way_back
        {
            wire.drive(context);
            frame = Pin::new(&mut this.body).poll_frame(context);
        }
        if matches!(frame, Poll::Ready(None)) {
            this.give_back();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for EngineBody {
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            self.give_back();
        }
    }
}
