//! A minimal HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Failure;

/// Maximum time for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends a request on a connection of its own. Returns the status and the whole reply, with head
/// and framing.
///
/// # Errors
/// There is no reply in time, or the reply has no status line.
pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String), Failure> {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).await?;
        Ok::<_, Failure>(reply)
    };
    let reply = timeout(REPLY_TIMEOUT, exchange).await.map_err(|_| "no reply in time")??;
    let reply = String::from_utf8_lossy(&reply).into_owned();
    let status = reply.split(' ').nth(1).ok_or("a reply without a status line")?.parse()?;
    Ok((status, reply))
}

/// The sum of a metric over all its series; 0 if there is none.
///
/// # Errors
/// There is no reply in time, or the reply has no status line.
pub(super) async fn metric(address: SocketAddr, path: &str, name: &str) -> Result<f64, Failure> {
    let [sum] = metrics(address, path, [name]).await?;
    Ok(sum)
}

/// The sums of several metrics, all read with one request.
///
/// # Errors
/// There is no reply in time, or the reply has no status line.
pub(super) async fn metrics<const N: usize>(
    address: SocketAddr,
    path: &str,
    names: [&str; N],
) -> Result<[f64; N], Failure> {
    let (_, text) = request(address, "GET", path, "").await?;
    Ok(names.map(|name| {
        let is_of_metric = |rest: &str| rest.starts_with('{') || rest.starts_with(' ');
        let series = text.lines().filter(|line| line.strip_prefix(name).is_some_and(is_of_metric));
        series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }))
}
