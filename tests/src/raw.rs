//! A client that writes bytes to a socket, for requests that no well-behaved HTTP client sends.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A reply, as far as it came.
#[derive(Debug, Default)]
pub struct RawReply {
    /// Status line and headers, lower-cased.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

impl RawReply {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let body = bytes[end + 4..].to_vec();
        Some(Self { head, body })
    }

    /// The status.
    pub fn status(&self) -> u16 {
        let word = self.head.split(' ').nth(1).unwrap_or_default();
        word.parse().unwrap_or_else(|_| panic!("{:?}", self.head))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A request's head and body of JSON as bytes, on a connection that is closed after it.
pub fn request(method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{method} {target} HTTP/1.1\r\nhost: splitrail\r\n");
    if method == "POST" {
        bytes += "content-type: application/json\r\n";
    }
    for (name, value) in headers {
        bytes += &format!("{name}: {value}\r\n");
    }
    bytes += &format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len());
    [bytes.as_bytes(), body].concat()
}

/// Connects from an address of this host.
pub async fn connect_from(own: Ipv4Addr, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((own, 0).into()).expect("an address of this host");
    socket.connect(address).await.expect("a connection")
}

/// Connects with little room for what is not read, so that it is the other side that waits.
pub async fn connect_narrow(address: SocketAddr) -> TcpStream {
    const ROOM_BYTES: u32 = 4096;
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(ROOM_BYTES).expect("a buffer");
    socket.connect(address).await.expect("a connection")
}

/// Reads so many bytes at a time until the connection ends, with a pause after each; how many
/// there were.
pub async fn read_slowly(socket: &mut TcpStream, at_once: usize, pause: Duration) -> usize {
    let mut buffer = vec![0; at_once];
    let mut bytes = 0;
    loop {
        let mut piece = 0;
        while piece < at_once {
            match socket.read(&mut buffer[piece..]).await {
                Ok(count @ 1..) => piece += count,
                _ => return bytes + piece,
            }
        }
        bytes += piece;
        tokio::time::sleep(pause).await;
    }
}

/// Sends bytes and reads what comes back until the connection ends; `None` if it
/// ends without a reply.
pub async fn exchange(address: SocketAddr, bytes: &[u8]) -> Option<RawReply> {
    flood(address, bytes, b"", 0).await.reply
}

/// What became of a flood.
#[derive(Debug)]
pub struct Flood {
    /// Bytes that the other side's socket took after the head.
    pub written_bytes: usize,
    /// Whether writing failed: the other side had closed.
    pub cut: bool,
    /// The reply.
    pub reply: Option<RawReply>,
}

/// Sends a head, then `piece` again and again, up to `max_bytes`, or until the
/// connection is cut. Reads the reply at the same time.
pub async fn flood(address: SocketAddr, head: &[u8], piece: &[u8], max_bytes: usize) -> Flood {
    let mut socket = TcpStream::connect(address).await.expect("a connection");
    let (mut reader, mut writer) = socket.split();
    let write = async {
        let mut written_bytes = 0;
        let mut cut = writer.write_all(head).await.is_err();
        while !cut && written_bytes < max_bytes {
            cut = writer.write_all(piece).await.is_err();
            written_bytes += piece.len();
        }
        (written_bytes, cut)
    };
    let read = async {
        let mut bytes = Vec::new();
        let mut buffer = [0; 16 << 10];
        // A reset after the reply is an end like any other.
        while let Ok(count @ 1..) = reader.read(&mut buffer).await {
            bytes.extend_from_slice(&buffer[..count]);
        }
        RawReply::parse(&bytes)
    };
    let both = tokio::time::timeout(PATIENCE, futures_util::future::join(write, read)).await;
    let ((written_bytes, cut), reply) = both.expect("an end in time");
    Flood { written_bytes, cut, reply }
}
