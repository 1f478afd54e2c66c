//! A client for ZMTP 3.0, the wire protocol of ZeroMQ, as far as KV events need
//! it: TCP, the NULL mechanism, SUB and DEALER.
//!
//! The project has its own client because a peer must not be able to make this process reserve
//! memory: the `zeromq` crate reserves whatever length a frame's header claims, has no bound on a
//! message, and reconnects in detached tasks. Here a message has a bound that is checked before its
//! bytes are read, a connection is a value, and what is not read stays in the kernel until TCP
//! slows the sender.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::net::TcpStream;

mod endpoint;
mod frame;
mod handshake;
mod pace;

pub use endpoint::{Endpoint, EndpointError};
pub use pace::Pace;

use frame::Header;
use pace::PacedStream;

/// Number of bytes that are read from the kernel together.
const READ_BYTES: usize = 16 << 10;
/// A read buffer larger than this is freed once it is empty.
const KEPT_BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of frames of a message; KV events use at most four.
const MAX_FRAMES: usize = 8;

/// How long a connection is silent before the peer's machine is asked whether it still exists.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Time between two such questions, of which [`KEEPALIVE_PROBES`] without an answer end the connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 2;

/// Why a connection ended or could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A network error.
    #[error("network: {0}")]
    Network(io::ErrorKind),
    /// No address of the endpoint is allowed.
    #[error("its address lies outside the allowed networks")]
    Outside,
    /// Connecting or the handshake took too long.
    #[error("no reply in time")]
    TimedOut,
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer does not use ZMTP 3 with the NULL mechanism.
    #[error("the peer does not speak ZMTP 3 without authentication: {0}")]
    Handshake(&'static str),
    /// The peer is another kind of socket than expected.
    #[error("the peer is not a {expected} socket")]
    WrongSocket {
        /// The expected kind.
        expected: &'static str,
    },
    /// A message exceeds the bound on bytes or frames.
    #[error("a message exceeds {limit_bytes} bytes or {MAX_FRAMES} frames")]
    MessageTooLarge {
        /// The bound on a message's bytes.
        limit_bytes: usize,
    },
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> Self {
        Self::Network(error.kind())
    }
}

/// Decides which addresses are allowed, after a name has been looked up.
#[derive(Clone)]
pub struct AddressFilter(Arc<dyn Fn(IpAddr) -> bool + Send + Sync>);

impl AddressFilter {
    /// Allows the addresses for which `admits` returns true.
    pub fn new(admits: impl Fn(IpAddr) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(admits))
    }
}

impl fmt::Debug for AddressFilter {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("AddressFilter(..)")
    }
}

async fn connect(
    endpoint: &Endpoint,
    admits: Option<&AddressFilter>,
) -> Result<TcpStream, WireError> {
    let Some(AddressFilter(admits)) = admits else {
        return Ok(TcpStream::connect(endpoint.address()).await?);
    };
    let found = tokio::net::lookup_host(endpoint.address()).await?;
    let admitted: Vec<SocketAddr> = found.filter(|address| admits(address.ip())).collect();
    match admitted.is_empty() {
        true => Err(WireError::Outside),
        false => Ok(TcpStream::connect(&admitted[..]).await?),
    }
}

/// A subscriber sends nothing, so that without keep-alive it would not notice that the peer's machine
/// is gone.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

/// The kind of this end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Sub,
    Dealer,
}

/// A connection after the handshake.
pub(crate) struct Connection {
    stream: PacedStream,
    buffer: BytesMut,
    /// Frames of a message whose last frame has not arrived yet.
    frames: Vec<Bytes>,
    frames_bytes: usize,
    max_message_bytes: usize,
}

impl Connection {
    /// Connects to an allowed address and performs the handshake, within `timeout`. Received
    /// messages may have at most `max_message_bytes`, all frames together.
    pub(crate) async fn open(
        endpoint: &Endpoint,
        admits: Option<&AddressFilter>,
        role: Role,
        max_message_bytes: usize,
        timeout: Duration,
    ) -> Result<Self, WireError> {
        let open = async {
            let stream = connect(endpoint, admits).await?;
            set_up(&stream)?;
            let mut connection = Self {
                stream: PacedStream::new(stream),
                buffer: BytesMut::new(),
                frames: Vec::new(),
                frames_bytes: 0,
                max_message_bytes,
            };
            handshake::run(&mut connection, role).await?;
            Ok(connection)
        };
        tokio::time::timeout(timeout, open).await.unwrap_or(Err(WireError::TimedOut))
    }

    /// Sends a message.
    pub(crate) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), WireError> {
        let mut bytes = Vec::new();
        for (index, body) in frames.iter().enumerate() {
            frame::encode(body, index + 1 < frames.len(), &mut bytes);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Subscribes to the messages of a publisher whose first frame starts with `topic`.
    pub(crate) async fn subscribe(&mut self, topic: &str) -> Result<(), WireError> {
        // In ZMTP 3.0 this is an ordinary message of the byte 1 and the prefix.
        self.send(&[&[&[1], topic.as_bytes()].concat()]).await
    }

    /// While the stream is busy, reads it at these times only.
    pub(crate) fn set_pace(&mut self, pace: Pace) {
        self.stream.set_pace(pace);
    }

    /// The next message. Cancel-safe: bytes that were read stay in the buffer.
    pub(crate) async fn receive(&mut self) -> Result<Vec<Bytes>, WireError> {
        loop {
            if let Some(message) = self.message()? {
                return Ok(message);
            }
            self.fill().await?;
        }
    }

    /// The next message, if it has arrived completely; does not wait.
    pub(crate) fn receive_now(&mut self) -> Result<Option<Vec<Bytes>>, WireError> {
        loop {
            if let Some(message) = self.message()? {
                return Ok(Some(message));
            }
            self.make_room();
            match self.stream.read_now(&mut self.buffer)? {
                None => return Ok(None),
                Some(0) => return Err(WireError::Closed),
                Some(_) => {}
            }
        }
    }

    /// The next message, if it is completely in the buffer; does not read.
    pub(crate) fn message(&mut self) -> Result<Option<Vec<Bytes>>, WireError> {
        while let Some((header, body)) = self.frame()? {
            if header.is_command {
                // The only command is PING, which peers send only on request.
                continue;
            }
            self.frames_bytes += body.len();
            self.frames.push(body);
            if !header.more {
                self.frames_bytes = 0;
                return Ok(Some(std::mem::take(&mut self.frames)));
            }
        }
        Ok(None)
    }

    /// The next frame, if it is completely in the buffer.
    fn frame(&mut self) -> Result<Option<(Header, Bytes)>, WireError> {
        let Some(header) = Header::parse(&self.buffer) else { return Ok(None) };
        let room = self.max_message_bytes - self.frames_bytes;
        if header.body_bytes > room as u64 || self.frames.len() == MAX_FRAMES {
            let limit_bytes = self.max_message_bytes;
            return Err(WireError::MessageTooLarge { limit_bytes });
        }
        let end = header.bytes + header.body_bytes as usize;
        let Some(body) = self.buffer.get(header.bytes..end) else { return Ok(None) };
        // Copied, so that a message that is kept does not keep the whole buffer in which it
        // arrived.
        let body = Bytes::copy_from_slice(body);
        self.buffer.advance(end);
        Ok(Some((header, body)))
    }

    /// Reads at least one more byte into the buffer.
    async fn fill(&mut self) -> Result<(), WireError> {
        self.make_room();
        let is_between = self.buffer.is_empty() && self.frames.is_empty();
        match self.stream.read(&mut self.buffer, is_between).await? {
            0 => Err(WireError::Closed),
            _ => Ok(()),
        }
    }

    fn make_room(&mut self) {
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BUFFER_BYTES {
            self.buffer = BytesMut::new();
        }
        self.buffer.reserve(READ_BYTES);
    }
}
