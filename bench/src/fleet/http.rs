//! As much HTTP as the workloads need of clients.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Failure;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks on a connection of its own; status and whole answer, head and framing included.
///
/// # Errors
/// If nobody answers.
pub(crate) async fn ask(
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
    let answering = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, Failure>(answer)
    };
    let answer = timeout(PATIENCE, answering).await.map_err(|_| "no reply in time")??;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).ok_or("no status line")?.parse()?;
    Ok((status, answer))
}

/// The sum of a metric over its series.
///
/// # Errors
/// If nobody answers.
pub(super) async fn metric(address: SocketAddr, path: &str, name: &str) -> Result<f64, Failure> {
    let [sum] = metrics(address, path, [name]).await?;
    Ok(sum)
}

/// The same of several metrics, at one time.
///
/// # Errors
/// If nobody answers.
pub(super) async fn metrics<const N: usize>(
    address: SocketAddr,
    path: &str,
    names: [&str; N],
) -> Result<[f64; N], Failure> {
    let (_, text) = ask(address, "GET", path, "").await?;
    Ok(names.map(|name| {
        let is_of_it = |rest: &str| rest.starts_with('{') || rest.starts_with(' ');
        let series = text.lines().filter(|line| line.strip_prefix(name).is_some_and(is_of_it));
        series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }))
}
