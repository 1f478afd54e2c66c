//! Writes the events of a reply to the client as gRPC messages.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame};
use splitrail_proto::v1;
use splitrail_proto::v1::generate_response::Event;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;

use super::super::streams::BodyProgress;
use super::call::status;
use super::head::Deadline;
use super::message::{put, succeeded};
use crate::service::log_failure;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_ledger::decisions::{Decision, DecisionHandle};
use splitrail_reply::merge::Events;
use splitrail_reply::openai_chunk::{ChunkChoice, ChunkUsage, OpenAiChunk};
use splitrail_settings::logging::RequestIds;

/// Pending messages of at least this many bytes are sent without waiting for further ones.
const FRAME_BYTES: usize = 32 << 10;
/// Initial capacity in bytes for messages; freed parts of the buffer are reused.
const ROOM_BYTES: usize = 1 << 10;

/// The body of a reply: pending messages go out in one frame, and the status in trailers.
pub(super) struct StreamedBody {
    events: Events,
    ids: RequestIds,
    decision: DecisionHandle,
    is_chat: bool,
    /// The usage that came last. It is sent once, as the last event.
    usage: Option<ChunkUsage>,
    /// Bytes that have not been sent yet.
    out: BytesMut,
    end: End,
    /// Fires at the call's deadline, if it has one.
    deadline: Option<Pin<Box<Sleep>>>,
}

/// The progress of a reply.
enum End {
    /// There may be further events.
    Open,
    /// There are no further events, and these trailers must be sent.
    Known(HeaderMap),
    /// Everything was sent.
    Told,
}

impl StreamedBody {
    /// A reply that has begun. `shows_route` says whether the client may see the decision.
    pub(super) fn new(
        events: Events,
        ids: RequestIds,
        decision: DecisionHandle,
        shows_route: bool,
        is_chat: bool,
        deadline: Option<Deadline>,
    ) -> Self {
        let mut out = BytesMut::with_capacity(ROOM_BYTES);
        let route = |decision: &Decision| v1::Route {
            flow: decision.flow.to_owned(),
            prefill_worker: decision.prefill_worker.as_deref().map(str::to_owned),
            decode_worker: decision.decode_worker.as_deref().unwrap_or_default().to_owned(),
            overlap_blocks: decision.overlap_blocks,
        };
        let route = shows_route.then(|| decision.with(route));
        let started = v1::Started { request_id: ids.request_id().to_owned(), route };
        put_event(&mut out, Event::Started(started));
        let deadline = deadline.map(|deadline| {
            // While the client's window is closed, this body is not polled.
            let progress = BodyProgress::of_this_stream();
            progress.iter().for_each(|progress| progress.end_at(deadline.at()));
            Box::pin(sleep_until(deadline.at()))
        });
        Self { events, ids, decision, is_chat, usage: None, out, end: End::Open, deadline }
    }

    /// Handles the next event.
    fn take(&mut self, event: Option<Result<Bytes, Error>>) {
        let failed = match event {
            None => {
                self.put_usage();
                return self.end = End::Known(succeeded());
            }
            Some(Ok(data)) => match convert(&data, self.is_chat, &mut self.out) {
                Some(usage) => {
                    self.usage = usage.or(self.usage.take());
                    return;
                }
                // An engine's leg fails at such a chunk before it comes here.
                None => {
                    let what = "an engine sent a chunk that is not OpenAI's";
                    let error = Error::new(ErrorKind::EngineFailed, what);
                    log_failure(&self.ids, None, &error);
                    error
                }
            },
            Some(Err(error)) => error,
        };
        self.put_usage();
        self.end = End::Known(trailers(&status(&self.ids, &failed)));
    }

    /// Appends the usage, if there is one with the prompt's tokens.
    fn put_usage(&mut self) {
        let Some(usage) = self.usage.take() else { return };
        let Some(prompt_tokens) = usage.prompt_tokens else { return };
        let cached_tokens = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
        let source = match (cached_tokens, self.decision.with(|decision| decision.cached_source)) {
            (Some(_), Some("engine")) => v1::CachedSource::Engine,
            (Some(_), _) => v1::CachedSource::Estimate,
            (None, _) => v1::CachedSource::Unspecified,
        };
        put_event(
            &mut self.out,
            Event::Usage(v1::Usage {
                prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens,
                cached_source: source.into(),
            }),
        );
    }
}

/// A status as trailers.
fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(3);
    if status.add_header(&mut trailers).is_err() {
        // The message cannot be part of a header; the code is what matters.
        trailers.insert(Status::GRPC_STATUS, (status.code() as i32).into());
    }
    trailers
}

impl Body for StreamedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        if matches!(this.end, End::Open)
            && let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            // Dropping the events ends the legs.
            this.events = Box::pin(futures_util::stream::empty());
            this.end = End::Known(trailers(&Deadline::status()));
        }
        while matches!(this.end, End::Open) && this.out.len() < FRAME_BYTES {
            match this.events.as_mut().poll_next(context) {
                Poll::Ready(event) => this.take(event),
                Poll::Pending if this.out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        if !this.out.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))));
        }
        Poll::Ready(match std::mem::replace(&mut this.end, End::Told) {
            End::Known(trailers) => Some(Ok(Frame::trailers(trailers))),
            End::Open | End::Told => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.end, End::Told)
    }
}

/// Appends the events of a chunk, and returns its usage; `None` if the bytes are not a chunk.
fn convert(data: &[u8], is_chat: bool, out: &mut BytesMut) -> Option<Option<ChunkUsage>> {
    let chunk = OpenAiChunk::read(data)?;
    for ChunkChoice { index, text, delta, finish_reason } in chunk.choices {
        let (text, reasoning) = match delta {
            Some(delta) if is_chat => (delta.content, delta.reasoning),
            _ => (text, None),
        };
        let text = text.unwrap_or_default();
        if !text.is_empty() || reasoning.is_some() {
            put_event(out, Event::Delta(v1::Delta { index, text, reasoning }));
        }
        if let Some(finish_reason) = finish_reason {
            put_event(out, Event::Finished(v1::Finished { index, finish_reason }));
        }
    }
    Some(chunk.usage)
}

fn put_event(out: &mut BytesMut, event: Event) {
    put(out, &v1::GenerateResponse { event: Some(event) });
}
