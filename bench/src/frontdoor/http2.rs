//! Closed-loop clients over HTTP/2, for HTTP and gRPC. Both use the same library and messages that
//! are encoded before the measurement, so that their figures can be compared.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::try_join_all;
use h2::client::{Builder, SendRequest};
use http::Request;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Failure;
use super::client::{Framing, Load, REPLY_TIMEOUT, Results};

/// Flow-control window of streams and connections in bytes, as widely used clients have it. With
/// its default window, the library closes a connection on which a hundred small frames wait to be
/// read.
const WINDOW_BYTES: u32 = 2 << 20;

/// Runs `clients` clients on one connection; none sends a request after `deadline`.
///
/// # Errors
/// A request gets no reply in time or a bad one, or the connection is closed.
pub(super) async fn run(
    address: SocketAddr,
    load: &Load,
    clients: usize,
    deadline: Instant,
) -> Result<Results, Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut library = Builder::new();
    library.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let (sender, connection) = library.handshake(stream).await?;
    let all = try_join_all((0..clients).map(|_| run_one(sender.clone(), load, deadline)));
    let all = tokio::select! {
        ended = connection => {
            ended?;
            return Err("the connection was closed".into());
        }
        all = all => all?,
    };
    let latencies = all.into_iter().flat_map(|results| results.latencies).collect();
    Ok(Results { latencies, misplaced: 0 })
}

async fn run_one(
    mut sender: SendRequest<Bytes>,
    load: &Load,
    deadline: Instant,
) -> Result<Results, Failure> {
    let mut results = Results::default();
    while Instant::now() < deadline {
        let (_, body) = load.next();
        let began = Instant::now();
        let exchange = async {
            sender = sender.clone().ready().await?;
            exchange(&mut sender, load.framing, body.clone()).await
        };
        timeout(REPLY_TIMEOUT, exchange).await.map_err(|_| "no reply in time")??;
        let now = Instant::now();
        results.latencies.push((now, (now - began).as_nanos() as u64));
    }
    Ok(results)
}

/// Sends one request and reads its whole reply.
async fn exchange(
    sender: &mut SendRequest<Bytes>,
    framing: Framing,
    body: Bytes,
) -> Result<(), Failure> {
    let is_http = framing == Framing::Http2;
    let request = match is_http {
        true => Request::post("http://router/v1/chat/completions")
            .header("content-type", "application/json")
            .header("content-length", body.len()),
        false => Request::post("http://router/splitrail.v1.FrontDoorService/Generate")
            .header("content-type", "application/grpc")
            .header("te", "trailers"),
    };
    let (reply, mut send) = sender.send_request(request.body(())?, false)?;
    send.send_data(body, true)?;
    let reply = reply.await?;
    if reply.status() != 200 {
        return Err(format!("a request is answered with {}", reply.status()).into());
    }
    let mut data = reply.into_body();
    let mut bytes = 0;
    while let Some(chunk) = data.data().await {
        let chunk = chunk?.len();
        data.flow_control().release_capacity(chunk)?;
        bytes += chunk;
    }
    if is_http {
        return Ok(());
    }
    let trailers = data.trailers().await?;
    let status = trailers.as_ref().and_then(|trailers| trailers.get("grpc-status"));
    match status {
        Some(status) if status == "0" && bytes > 0 => Ok(()),
        status => {
            Err(format!("a call ended with grpc-status {status:?} after {bytes} bytes").into())
        }
    }
}
