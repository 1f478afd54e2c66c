//! HTTP/2 frames written by hand, for clients that no library would let one be.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Nothing takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Frame types and flags of RFC 9113, section 6.
pub mod kind {
    #![allow(missing_docs)]
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its type.
    pub kind: u8,
    /// Its flags.
    pub flags: u8,
    /// Its stream; 0 is the connection.
    pub stream: u32,
    /// What is in it.
    pub payload: Vec<u8>,
}

/// A frame as bytes.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a payload").to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A header field as HPACK's literal, neither indexed nor compressed.
pub fn field(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    string(&mut bytes, name);
    string(&mut bytes, value);
    bytes
}

/// A header field that is put into the dynamic table.
pub fn indexed_field(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = field(name, value);
    bytes[0] = 0x40;
    bytes
}

/// A string with its length; RFC 7541, section 5.
fn string(bytes: &mut Vec<u8>, text: &str) {
    match text.len() {
        short @ 0..127 => bytes.push(short as u8),
        long => {
            bytes.push(127);
            let mut rest = long - 127;
            while rest >= 128 {
                bytes.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            bytes.push(rest as u8);
        }
    }
    bytes.extend(text.as_bytes());
}

/// The header block of `POST PATH` with a body of JSON.
pub fn post(path: &str) -> Vec<u8> {
    // Of the static table: POST is 3, the scheme http 6.
    let mut block = vec![0x83, 0x86];
    block.extend(field(":path", path));
    block.extend(field(":authority", "x"));
    block.extend(field("content-type", "application/json"));
    block
}

/// The header block of `GET PATH`.
pub fn get(path: &str) -> Vec<u8> {
    // Of the static table: GET is 2, the scheme http 6.
    let mut block = vec![0x82, 0x86];
    block.extend(field(":path", path));
    block.extend(field(":authority", "x"));
    block
}

/// A request to `path` with a whole body, as frames.
pub fn request(stream: u32, path: &str, body: &[u8]) -> Vec<u8> {
    let head = frame(kind::HEADERS, kind::END_HEADERS, stream, &post(path));
    [head, frame(kind::DATA, kind::END_STREAM, stream, body)].concat()
}

/// Lets the other side send so many bytes more on a stream, or on the connection (0).
pub fn window(stream: u32, bytes: u32) -> Vec<u8> {
    frame(kind::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

/// The setting of the window that a new stream has.
pub fn initial_window(bytes: u32) -> Vec<u8> {
    const NAME: [u8; 2] = [0, 4];
    [&NAME[..], &bytes.to_be_bytes()].concat()
}

/// A connection on which a client has said that it speaks HTTP/2.
pub struct Raw2 {
    writer: OwnedWriteHalf,
    reader: Reader,
}

struct Reader {
    half: OwnedReadHalf,
    buffer: Vec<u8>,
}

/// What became of a flood.
#[derive(Debug)]
pub struct Flooded {
    /// Pieces that the other side's socket took.
    pub pieces: usize,
    /// Whether the other side ended it.
    pub ended: bool,
    /// The error code of its GOAWAY, if it said why.
    pub goaway: Option<u32>,
}

impl Raw2 {
    /// Connects, with these settings (each two bytes of name, four of value).
    pub async fn connect(address: SocketAddr, settings: &[u8]) -> Self {
        let socket = TcpStream::connect(address).await.expect("a connection");
        Self::over(socket, settings).await
    }

    /// Begins on a connection, with these settings.
    pub async fn over(socket: TcpStream, settings: &[u8]) -> Self {
        let (half, mut writer) = socket.into_split();
        let first = frame(kind::SETTINGS, 0, 0, settings);
        writer.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("a preface");
        writer.write_all(&first).await.expect("settings");
        Self { writer, reader: Reader { half, buffer: Vec::new() } }
    }

    /// Writes bytes; whether the other side still takes them.
    pub async fn write(&mut self, bytes: &[u8]) -> bool {
        self.writer.write_all(bytes).await.is_ok()
    }

    /// Ends the sending direction of the connection with a FIN.
    pub async fn finish(&mut self) {
        self.writer.shutdown().await.expect("an open connection");
    }

    /// Ends the connection with a RST, and no FIN before it.
    pub fn reset(self) {
        self.writer.as_ref().set_zero_linger().expect("an open connection");
        self.writer.forget();
    }

    /// The next frame; `None` once the other side has closed.
    pub async fn next(&mut self) -> Option<Frame> {
        let next = tokio::time::timeout(PATIENCE, self.reader.next()).await;
        next.expect("a frame or the end in time")
    }

    /// The next frame of a stream; `None` once the other side has closed.
    pub async fn next_of(&mut self, stream: u32) -> Option<Frame> {
        loop {
            let frame = self.next().await?;
            if frame.stream == stream {
                return Some(frame);
            }
        }
    }

    /// Writes pieces until the other side ends the connection, or there are no more. Reads at
    /// the same time.
    pub async fn flood(mut self, pieces: impl Iterator<Item = Vec<u8>>) -> Flooded {
        let write = async {
            let mut taken = 0;
            for piece in pieces {
                if self.writer.write_all(&piece).await.is_err() {
                    return (taken, true);
                }
                taken += 1;
            }
            (taken, false)
        };
        let read = async {
            let mut goaway = None;
            while let Some(frame) = self.reader.next().await {
                if frame.kind == kind::GOAWAY && frame.payload.len() >= 8 {
                    let code = frame.payload[4..8].try_into().expect("four bytes");
                    goaway = Some(u32::from_be_bytes(code));
                }
            }
            goaway
        };
        let mut write = std::pin::pin!(write);
        let mut read = std::pin::pin!(read);
        let both = async {
            tokio::select! {
                // What was written is gone; whether it was enough shows in the reading.
                (pieces, cut) = &mut write => {
                    let goaway = tokio::time::timeout(PATIENCE / 4, &mut read).await;
                    let ended = cut || goaway.is_ok();
                    Flooded { pieces, ended, goaway: goaway.ok().flatten() }
                }
                goaway = &mut read => Flooded { pieces: 0, ended: true, goaway },
            }
        };
        tokio::time::timeout(PATIENCE, both).await.expect("an end in time")
    }
}

impl Reader {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(&[a, b, c, kind, flags, d, e, f, g]) = self.buffer.first_chunk::<9>() {
                let length = u32::from_be_bytes([0, a, b, c]) as usize;
                if self.buffer.len() >= 9 + length {
                    let payload = self.buffer[9..9 + length].to_vec();
                    self.buffer.drain(..9 + length);
                    let stream = u32::from_be_bytes([d & 127, e, f, g]);
                    return Some(Frame { kind, flags, stream, payload });
                }
            }
            let mut piece = [0; 16 << 10];
            match self.half.read(&mut piece).await {
                Ok(count @ 1..) => self.buffer.extend_from_slice(&piece[..count]),
                _ => return None,
            }
        }
    }
}
