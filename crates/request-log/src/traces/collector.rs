//! Sends spans to a collector, by OTLP/gRPC or OTLP/HTTP.
//!
//! Both are one HTTP request with one protobuf message. A connection is kept for half a minute: a
//! busy router sends many batches a second, and balancers in front of collectors choose one for each
//! connection.
//! <https://opentelemetry.io/docs/specs/otlp/>

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::buf::Chain;
use bytes::{Buf, BufMut, Bytes};
use http::header::{CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Collected, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use splitrail_config::engine_tls::{EngineTlsFiles, SystemAuthorities};
use splitrail_config::model::{EngineTls, OtlpConfig, OtlpProtocol, OtlpTarget};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The method of OTLP/gRPC.
const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// Maximum size of a reply in bytes. It has no more than a sentence.
const REPLY_MAX_BYTES: usize = 64 << 10;
/// Length of the prefix of a message of gRPC: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// The codes of gRPC after which the same request may be sent again, by OTLP: cancelled,
/// deadline exceeded, aborted, out of range, unavailable, data loss.
const PASSING_CODES: [i32; 6] = [1, 4, 10, 11, 14, 15];

/// Maximum time for which a connection gets further batches.
const CONNECTION_MAX: Duration = Duration::from_secs(30);

/// A message in two parts: the spans are long, and are not copied to stand behind their head.
#[derive(Clone, Debug)]
pub(super) struct ExportMessage {
    pub(super) head: Bytes,
    pub(super) spans: Bytes,
}

/// The bytes of a message.
type MessageBytes = Chain<Bytes, Bytes>;

/// A collector.
pub(super) struct Collector {
    protocol: OtlpProtocol,
    target: OtlpTarget,
    headers: HeaderMap,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    timeout: Duration,
}

/// Why a collector has not taken spans. Nothing of its reply's text is quoted.
#[derive(Debug)]
pub(super) struct ExportRefusal {
    pub(super) why: String,
    /// Whether the same spans may be taken later.
    pub(super) is_passing: bool,
}

impl ExportRefusal {
    fn passing(why: impl ToString) -> Self {
        Self { why: why.to_string(), is_passing: true }
    }

    fn lasting(why: impl ToString) -> Self {
        Self { why: why.to_string(), is_passing: false }
    }
}

impl Collector {
    /// The collector of a configuration. Reads its secrets and certificates.
    pub(super) fn new(config: &OtlpConfig) -> Result<Self, String> {
        let target = config.target().map_err(|bad| format!("endpoint {}", bad.why))?;
        let mut headers = HeaderMap::new();
        for header in &config.headers {
            let name = HeaderName::from_bytes(header.name.as_bytes());
            let name = name.map_err(|error| format!("header {}: {error}", header.name))?;
            let value = header.value.resolve_header();
            headers
                .insert(name, value.map_err(|error| format!("header {}: {error}", header.name))?);
        }
        let tls = target.uses_tls().then(|| tls(config, &target)).transpose()?;
        Ok(Self { protocol: config.protocol, target, headers, tls, timeout: config.timeout })
    }

    /// Sends an `ExportTraceServiceRequest`, on the connection in `kept` if there is one. Returns the
    /// number of spans that the collector has rejected.
    pub(super) async fn send(
        &self,
        kept: &mut Option<Connection>,
        message: &ExportMessage,
    ) -> Result<usize, ExportRefusal> {
        let late = |_| ExportRefusal::passing("it does not reply within tracing.otlp.timeout");
        let exchanged = timeout(self.timeout, self.exchange(kept.take(), message)).await;
        let ((head, body), connection) = exchanged.map_err(late)??;
        let rejected = match self.protocol {
            OtlpProtocol::Http => http_result(&head, &body.to_bytes())?,
            OtlpProtocol::Grpc => grpc_result(&head, body)?,
        };
        *kept = connection;
        Ok(rejected)
    }

    async fn exchange(
        &self,
        kept: Option<Connection>,
        message: &ExportMessage,
    ) -> Result<Exchange, ExportRefusal> {
        let kept = kept.filter(|kept| kept.opened.elapsed() < CONNECTION_MAX);
        // The collector may have closed the connection meanwhile.
        if let Some(kept) = kept
            && let Ok(exchanged) = kept.call(self.request(message)).await
        {
            return Ok(exchanged);
        }
        self.connect().await?.call(self.request(message)).await
    }

    async fn connect(&self) -> Result<Connection, ExportRefusal> {
        let unreachable =
            |error: io::Error| ExportRefusal::passing(format!("no connection: {error}"));
        let stream = TcpStream::connect(self.target.authority()).await.map_err(unreachable)?;
        // The message goes out in one write after the head.
        stream.set_nodelay(true).map_err(unreachable)?;
        match &self.tls {
            None => Connection::open(self.protocol, stream).await,
            Some((config, name)) => {
                let connector = TlsConnector::from(Arc::clone(config));
                let stream = connector.connect(name.clone(), stream).await;
                Connection::open(self.protocol, stream.map_err(unreachable)?).await
            }
        }
    }

    fn request(&self, message: &ExportMessage) -> Request<Full<MessageBytes>> {
        const AGENT: &str = concat!("splitrail/", env!("CARGO_PKG_VERSION"));
        let authority = self.target.authority();
        let ExportMessage { head, spans } = message.clone();
        let (uri, content_type, head) = match self.protocol {
            OtlpProtocol::Http => (self.target.path.clone(), "application/x-protobuf", head),
            OtlpProtocol::Grpc => {
                let mut framed = Vec::with_capacity(PREFIX_BYTES + head.len());
                framed.put_u8(0);
                framed.put_u32((head.len() + spans.len()) as u32);
                framed.put_slice(&head);
                (format!("{}{EXPORT}", self.target.origin), "application/grpc", framed.into())
            }
        };
        let mut request = Request::new(Full::new(head.chain(spans)));
        *request.method_mut() = http::Method::POST;
        // Both were checked with the configuration.
        *request.uri_mut() = uri.parse().unwrap_or_default();
        let headers = request.headers_mut();
        headers.extend(self.headers.clone());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        match self.protocol {
            OtlpProtocol::Grpc => {
                headers.insert(TE, HeaderValue::from_static("trailers"));
            }
            OtlpProtocol::Http => {
                if let Ok(host) = HeaderValue::from_str(authority) {
                    headers.insert(HOST, host);
                }
            }
        }
        request
    }
}

/// A reply of the collector.
type Reply = (http::response::Parts, Collected<Bytes>);

/// A reply, and the connection if it can be used again.
type Exchange = (Reply, Option<Connection>);

/// A connection to the collector.
pub(super) struct Connection {
    sender: Sender,
    /// The work of the connection, which is done while a call waits.
    driver: Pin<Box<dyn Future<Output = ()> + Send>>,
    opened: Instant,
}

enum Sender {
    Http(http1::SendRequest<Full<MessageBytes>>),
    Grpc(http2::SendRequest<Full<MessageBytes>>),
}

impl Connection {
    async fn open<S>(protocol: OtlpProtocol, stream: S) -> Result<Self, ExportRefusal>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let opened = Instant::now();
        // How a connection ends shows in its calls.
        Ok(match protocol {
            OtlpProtocol::Http => {
                let (sender, driver) =
                    http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
                let driver = Box::pin(async { drop(driver.await) });
                Self { sender: Sender::Http(sender), driver, opened }
            }
            OtlpProtocol::Grpc => {
                let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
                let (sender, driver) = handshake.await.map_err(broken)?;
                let driver = Box::pin(async { drop(driver.await) });
                Self { sender: Sender::Grpc(sender), driver, opened }
            }
        })
    }

    async fn call(self, request: Request<Full<MessageBytes>>) -> Result<Exchange, ExportRefusal> {
        let Self { mut sender, mut driver, opened } = self;
        let call = async {
            match &mut sender {
                Sender::Http(sender) => {
                    sender.ready().await.map_err(broken)?;
                    read(sender.send_request(request).await).await
                }
                Sender::Grpc(sender) => {
                    sender.ready().await.map_err(broken)?;
                    read(sender.send_request(request).await).await
                }
            }
        };
        let (reply, is_open) = beside(&mut driver, call).await;
        Ok((reply?, is_open.then_some(Self { sender, driver, opened })))
    }
}

fn tls(
    config: &OtlpConfig,
    target: &OtlpTarget,
) -> Result<(Arc<ClientConfig>, ServerName<'static>), String> {
    let section = EngineTls { ca: config.ca.clone(), ..EngineTls::default() };
    let files = EngineTlsFiles::read(&section).map_err(|error| error.to_string())?;
    let system = (!files.has_own_authorities()).then(SystemAuthorities::read);
    if system.as_ref().is_some_and(SystemAuthorities::is_empty) {
        return Err("the system has no certificates of authorities; set `ca`".to_owned());
    }
    let tls = files.client_config(system.as_ref()).map_err(|error| error.to_string())?;
    let mut tls = ClientConfig::clone(&tls);
    if config.protocol == OtlpProtocol::Grpc {
        tls.alpn_protocols = vec![b"h2".to_vec()];
    }
    let host = target.authority().rsplit_once(':').map_or("", |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
    Ok((Arc::new(tls), name))
}

/// Runs a call beside the connection that it uses. Returns whether the connection is still open.
async fn beside<T>(
    mut connection: impl Future<Output = ()> + Unpin,
    call: impl Future<Output = T>,
) -> (T, bool) {
    let mut call = std::pin::pin!(call);
    let mut is_open = true;
    loop {
        tokio::select! {
            result = &mut call => return (result, is_open),
            // The reply may be complete in memory when the connection ends.
            () = &mut connection, if is_open => is_open = false,
        }
    }
}

async fn read(reply: Result<Response<Incoming>, hyper::Error>) -> Result<Reply, ExportRefusal> {
    let (head, body) = reply.map_err(broken)?.into_parts();
    let body = Limited::new(body, REPLY_MAX_BYTES).collect().await;
    let body = body.map_err(|_| ExportRefusal::passing("its reply broke off or is too long"))?;
    Ok((head, body))
}

fn broken(error: hyper::Error) -> ExportRefusal {
    ExportRefusal::passing(format!("no valid HTTP: {error}"))
}

fn http_result(head: &http::response::Parts, body: &[u8]) -> Result<usize, ExportRefusal> {
    match head.status {
        StatusCode::OK => rejected(body),
        // These may be sent again, by OTLP.
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => {
            Err(ExportRefusal::passing(format!("status {}", head.status.as_u16())))
        }
        status => Err(ExportRefusal::lasting(format!("status {}", status.as_u16()))),
    }
}

fn grpc_result(
    head: &http::response::Parts,
    body: Collected<Bytes>,
) -> Result<usize, ExportRefusal> {
    if head.status != StatusCode::OK {
        return Err(ExportRefusal::passing(format!("HTTP status {}", head.status.as_u16())));
    }
    let code = |headers: &HeaderMap| {
        let code = headers.get("grpc-status")?.to_str().ok()?;
        code.parse::<i32>().ok()
    };
    // A reply without a message has its status in the head.
    let status = body.trailers().and_then(code).or_else(|| code(&head.headers));
    match status {
        Some(0) => {}
        Some(code) => {
            let is_passing = PASSING_CODES.contains(&code);
            return Err(ExportRefusal { why: format!("gRPC status {code}"), is_passing });
        }
        None => return Err(ExportRefusal::lasting("its reply has no gRPC status")),
    }
    let body = body.to_bytes();
    match body.split_at_checked(PREFIX_BYTES) {
        Some(([0, _length @ ..], message)) => rejected(message),
        _ => Err(ExportRefusal::lasting("its reply is not a gRPC message")),
    }
}

/// The number of rejected spans in an `ExportTraceServiceResponse`.
fn rejected(message: &[u8]) -> Result<usize, ExportRefusal> {
    let reply = ExportTraceServiceResponse::decode(message)
        .map_err(|_| ExportRefusal::lasting("its reply cannot be understood"))?;
    let rejected = reply.partial_success.map_or(0, |partial| partial.rejected_spans);
    Ok(usize::try_from(rejected).unwrap_or(0))
}
