//! The wire format of messages: one byte that says whether the message is compressed, four bytes
//! with its length, and the message.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::Body;
use prost::Message;
use tonic::Status;

use super::super::request_body::{BoundedBody, RESERVED_MAX_BYTES};
use splitrail_api::memory_budget::Charge;

/// Number of bytes before each message.
pub(super) const PREFIX_BYTES: usize = 5;

/// Refuses compressed messages, which would have to be inflated.
///
/// # Errors
/// `UNIMPLEMENTED`, with the accepted encodings.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Status> {
    let mut encodings = headers.get_all("grpc-encoding").iter();
    let Some(encoding) = encodings.find(|encoding| *encoding != "identity") else {
        return Ok(());
    };
    let named = encoding.to_str().unwrap_or("unknown");
    let mut status = Status::unimplemented(format!(
        "messages compressed with `{named}` are not accepted: send them as they are"
    ));
    let accepted = tonic::metadata::MetadataValue::from_static("identity");
    status.metadata_mut().insert("grpc-accept-encoding", accepted);
    Err(status)
}

/// Receives the message of a call with one message, still encoded, and its charge to the memory
/// budget. The body is first read to its end, which well-behaved clients send with the message.
///
/// # Errors
/// The message is too large or too slow, compressed, incomplete or followed by another one, there
/// is no memory for it, or the client disconnects.
pub(super) async fn receive(
    mut body: BoundedBody<impl Body<Data = Bytes> + Unpin>,
    max_bytes: usize,
) -> Result<(Bytes, Charge), Status> {
    let mut gathered = GatheredBody::default();
    let mut end = None;
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|error| error.to_grpc())?;
        let Ok(piece) = frame.into_data() else { continue };
        gathered.push(piece);
        if end.is_none()
            && let Some(bytes) = length(gathered.bytes(), max_bytes)?
        {
            gathered.expect(PREFIX_BYTES + bytes);
            end = Some(PREFIX_BYTES + bytes);
        }
        if end.is_some_and(|end| gathered.bytes().len() > end) {
            return Err(Status::internal("the call has more than one message"));
        }
    }
    let all = gathered.whole();
    match end {
        Some(end) if all.len() == end => Ok((all.slice(PREFIX_BYTES..), body.into_held())),
        None if all.is_empty() => Err(Status::internal("the call has no message")),
        _ => Err(Status::internal("the call ends within its message")),
    }
}

/// The length of the message that begins here; `None` while its prefix is incomplete.
fn length(text: &[u8], max_bytes: usize) -> Result<Option<usize>, Status> {
    let Some(mut prefix) = text.get(..PREFIX_BYTES) else { return Ok(None) };
    match prefix.get_u8() {
        0 => {}
        1 => return Err(Status::internal("a compressed message, and no `grpc-encoding`")),
        _ => return Err(Status::internal("a message whose first byte is neither 0 nor 1")),
    }
    let bytes = prefix.get_u32() as usize;
    if bytes > max_bytes {
        let message = format!(
            "the message has {bytes} bytes; at most {max_bytes} are allowed (limits.body_size_max)"
        );
        return Err(Status::out_of_range(message));
    }
    Ok(Some(bytes))
}

/// The pieces of a body. A single piece is left in its receive buffer; otherwise each piece is
/// copied immediately, so that its buffer is free for the next one.
#[derive(Default)]
struct GatheredBody {
    only: Bytes,
    several: Vec<u8>,
    expected: usize,
}

impl GatheredBody {
    fn push(&mut self, piece: Bytes) {
        if self.bytes().is_empty() {
            self.only = piece;
            return;
        }
        let only = std::mem::take(&mut self.only);
        if self.several.is_empty() {
            // The announced length is reserved before the bytes arrive, up to a bound.
            self.several.reserve(self.expected.min(RESERVED_MAX_BYTES));
        }
        self.several.extend_from_slice(&only);
        self.several.extend_from_slice(&piece);
    }

    /// Sets the announced total length in bytes.
    fn expect(&mut self, bytes: usize) {
        self.expected = bytes;
    }

    fn bytes(&self) -> &[u8] {
        if self.several.is_empty() { &self.only } else { &self.several }
    }

    fn whole(self) -> Bytes {
        if self.several.is_empty() { self.only } else { self.several.into() }
    }
}

/// Appends a message with its prefix.
pub(super) fn put(out: &mut BytesMut, message: &impl Message) {
    let bytes = message.encoded_len();
    out.reserve(PREFIX_BYTES + bytes);
    out.put_u8(0);
    // Replies are bounded far below this (limits.engine_reply_size_max).
    out.put_u32(u32::try_from(bytes).unwrap_or(u32::MAX));
    message.encode_raw(out);
}

/// The trailers of a successful call.
pub(super) fn succeeded() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    trailers
}
