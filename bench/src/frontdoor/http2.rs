//! The same clients over HTTP/2, speaking HTTP or gRPC: one library for both, and messages
//! that are encoded beforehand.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::try_join_all;
use h2::client::{Builder, SendRequest};
use http::Request;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Failure;
use super::client::{Framing, Load, PATIENCE, Seen};

/// What servers may send ahead, as clients in use have it. With the library's least, it ends a
/// connection for a hundred small frames that are not read at once.
const WINDOW_BYTES: u32 = 2 << 20;

/// A connection with so many clients on it, until `ends`.
///
/// # Errors
/// Whatever is not answered well.
pub(super) async fn run(
    address: SocketAddr,
    load: &Load,
    clients: usize,
    ends: Instant,
) -> Result<Seen, Failure> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut library = Builder::new();
    library.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let (sender, connection) = library.handshake(stream).await?;
    let all = try_join_all((0..clients).map(|_| one(sender.clone(), load, ends)));
    let all = tokio::select! {
        ended = connection => {
            ended?;
            return Err("the connection was closed".into());
        }
        all = all => all?,
    };
    let latencies = all.into_iter().flat_map(|seen| seen.latencies).collect();
    Ok(Seen { latencies, misplaced: 0 })
}

async fn one(mut sender: SendRequest<Bytes>, load: &Load, ends: Instant) -> Result<Seen, Failure> {
    let mut seen = Seen::default();
    while Instant::now() < ends {
        let (_, body) = load.next();
        let began = Instant::now();
        let exchange = async {
            sender = sender.clone().ready().await?;
            exchange(&mut sender, load.framing, body.clone()).await
        };
        timeout(PATIENCE, exchange).await.map_err(|_| "no reply in time")??;
        let now = Instant::now();
        seen.latencies.push((now, (now - began).as_nanos() as u64));
    }
    Ok(seen)
}

/// One request with its whole answer.
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
    let (answer, mut send) = sender.send_request(request.body(())?, false)?;
    send.send_data(body, true)?;
    let answer = answer.await?;
    if answer.status() != 200 {
        return Err(format!("an answer that is no 200: {}", answer.status()).into());
    }
    let mut data = answer.into_body();
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
        status => Err(format!("a call that ends with {status:?} after {bytes} bytes").into()),
    }
}
