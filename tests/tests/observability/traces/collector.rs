//! A collector of traces that takes spans, or behaves badly.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use splitrail_tests::cluster::eventually;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// The protocol of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Grpc,
    Http,
}

/// How a collector replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The collector takes all spans.
    Take,
    /// The collector refuses them with a status after which they are not sent again.
    Refuse,
    /// The reply is not OTLP.
    Nonsense,
    /// The collector never replies.
    Never,
}

/// A batch as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) bytes: Vec<u8>,
    pub(crate) request: ExportTraceServiceRequest,
}

/// A running collector. Dropping it closes it.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    protocol: Protocol,
    batches: Arc<Mutex<Vec<Batch>>>,
    accepted: Arc<AtomicUsize>,
    cut: Arc<Notify>,
    _tasks: JoinSet<()>,
}

impl Collector {
    pub(crate) async fn start(protocol: Protocol, reply: Reply) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let batches: Arc<Mutex<Vec<Batch>>> = Arc::default();
        let heard = Arc::clone(&batches);
        let (accepted, cut) = (Arc::<AtomicUsize>::default(), Arc::<Notify>::default());
        let (count, cuts) = (Arc::clone(&accepted), Arc::clone(&cut));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let stream = tokio::select! {
                    connection = listener.accept() => connection.unwrap().0,
                    () = cuts.notified() => {
                        connections.shutdown().await;
                        continue;
                    }
                };
                count.fetch_add(1, Relaxed);
                let heard = Arc::clone(&heard);
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        let heard = Arc::clone(&heard);
                        async move { Ok::<_, Infallible>(take(protocol, reply, &heard, request).await) }
                    });
                    let stream = TokioIo::new(stream);
                    // The router may close the connection at any time.
                    let _closed = match protocol {
                        Protocol::Http => {
                            http1::Builder::new().serve_connection(stream, service).await
                        }
                        Protocol::Grpc => {
                            let builder = http2::Builder::new(TokioExecutor::new());
                            builder.serve_connection(stream, service).await
                        }
                    };
                });
            }
        });
        Self { address, protocol, batches, accepted, cut, _tasks: tasks }
    }

    /// The number of connections so far.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Relaxed)
    }

    /// Closes all connections.
    pub(crate) fn cut(&self) {
        self.cut.notify_one();
    }

    /// The configuration of a router that exports to this collector, with further keys of
    /// `tracing.otlp` behind a comma.
    pub(crate) fn tracing(&self, more: &str) -> String {
        let protocol = match self.protocol {
            Protocol::Grpc => "grpc",
            Protocol::Http => "http",
        };
        let address = self.address;
        format!(
            "tracing: {{ otlp: {{ endpoint: 'http://{address}', protocol: {protocol}{more} }} }}\n"
        )
    }

    pub(crate) fn batches(&self) -> Vec<Batch> {
        self.batches.lock().unwrap().clone()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let batches = self.batches();
        let resources = batches.into_iter().flat_map(|batch| batch.request.resource_spans);
        let scopes = resources.flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    /// Waits until spans of as many requests have arrived, and returns all spans.
    pub(crate) async fn traced(&self, requests: usize) -> Vec<Span> {
        let arrived = || self.spans().iter().filter(|span| span.name == "request").count();
        eventually("the spans have arrived", async || arrived() >= requests).await;
        self.spans()
    }
}

async fn take(
    protocol: Protocol,
    reply: Reply,
    heard: &Mutex<Vec<Batch>>,
    request: Request<Incoming>,
) -> Response<http_body_util::combinators::BoxBody<Bytes, Infallible>> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return std::future::pending().await };
    let bytes = body.to_bytes();
    let message = match protocol {
        Protocol::Http => &bytes[..],
        Protocol::Grpc => &bytes[5..],
    };
    heard.lock().unwrap().push(Batch {
        path: head.uri.path().to_owned(),
        headers: head.headers,
        bytes: message.to_vec(),
        request: ExportTraceServiceRequest::decode(message).unwrap(),
    });
    let whole = |bytes: &'static [u8]| Full::new(Bytes::from_static(bytes));
    let trailers = |code: &'static str| {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static(code));
        std::future::ready(Some(Ok(trailers)))
    };
    let mut response = match (protocol, reply) {
        (_, Reply::Never) => std::future::pending().await,
        (Protocol::Http, Reply::Take) => Response::new(whole(b"").boxed()),
        (Protocol::Http, Reply::Refuse) => {
            let mut response = Response::new(whole(b"no").boxed());
            *response.status_mut() = http::StatusCode::BAD_REQUEST;
            response
        }
        (Protocol::Http, Reply::Nonsense) => Response::new(whole(b"<html>\xff\xff").boxed()),
        (Protocol::Grpc, Reply::Take) => {
            Response::new(whole(&[0; 5]).with_trailers(trailers("0")).boxed())
        }
        (Protocol::Grpc, Reply::Refuse) => {
            Response::new(whole(b"").with_trailers(trailers("3")).boxed())
        }
        (Protocol::Grpc, Reply::Nonsense) => {
            Response::new(whole(b"<html>\xff").with_trailers(trailers("0")).boxed())
        }
    };
    let kind = match protocol {
        Protocol::Http => "application/x-protobuf",
        Protocol::Grpc => "application/grpc",
    };
    response.headers_mut().insert("content-type", HeaderValue::from_static(kind));
    response
}

/// An attribute of a span as text; empty if the span does not have it.
pub(crate) fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.clone()?.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::BoolValue(flag)) => flag.to_string(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        _ => String::new(),
    }
}
