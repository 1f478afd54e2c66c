//! Converts an engine's outputs to a complete reply or a stream.

use std::collections::VecDeque;
use std::io;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{StatusCode, header};
use serde_json::{Value, json};

use super::endpoint::Endpoint;
use super::request_body::InferenceRequest;
use super::shape::{ReplyChoice, Shape, Usage};
use crate::config::ThresholdReply;
use crate::engine::Submission;
use crate::engine::hand_off::HandOff;
use crate::engine::request::{End, FinishReason, Output, RemoteKv};
use crate::error::{ApiError, json_response};
use crate::faults::RequestFaults;
use crate::tokenizer;

/// The state of a request's reply.
#[derive(Debug)]
pub(crate) struct PendingReply {
    shape: Shape,
    request: InferenceRequest,
    block_size: usize,
    faults: RequestFaults,
    choices: Vec<Progress>,
    cached_tokens: usize,
    completion_tokens: usize,
    /// Number of named events so far.
    events: u64,
}

#[derive(Debug, Default)]
struct Progress {
    /// Text that was not sent yet.
    text: String,
    token_ids: Vec<u32>,
    given_any: bool,
    finish_reason: Option<&'static str>,
    stop_reason: Option<String>,
    hand_off: Option<HandOff>,
    /// Text that was sent, if the last event repeats it.
    sent_text: String,
}

impl PendingReply {
    pub(crate) fn new(
        shape: Shape,
        request: InferenceRequest,
        block_size: usize,
        faults: RequestFaults,
    ) -> Self {
        let choices = request.samples.iter().map(|_| Progress::default()).collect();
        let (cached_tokens, completion_tokens, events) = (0, 0, 0);
        Self {
            shape,
            request,
            block_size,
            faults,
            choices,
            cached_tokens,
            completion_tokens,
            events,
        }
    }

    /// Handles one output; an error ends the whole reply.
    fn take(&mut self, choice: usize, output: Output) -> Result<(), ApiError> {
        let progress = &mut self.choices[choice];
        match output {
            // As in the real engine, the last prompt of a batch determines the value for all
            // prompts.
            Output::Started { cached_tokens } => self.cached_tokens = cached_tokens,
            Output::BelowThreshold if self.shape.threshold_reply == ThresholdReply::Status412 => {
                let message = "The prompt's cached share is below cache_hit_threshold.";
                return Err(ApiError::new(StatusCode::PRECONDITION_FAILED, message));
            }
            Output::BelowThreshold => progress.finish_reason = Some("cache_threshold"),
            Output::Failed(error) => return Err(error),
            Output::Token { .. }
                if self.faults.abort_after_tokens == Some(self.completion_tokens) =>
            {
                progress.finish_reason = Some("abort");
            }
            Output::Token { id, end } => {
                self.completion_tokens += 1;
                progress.token_ids.push(id);
                progress.text.push_str(&tokenizer::decode(&[id], true));
                if let Some(end) = end {
                    progress.end(end);
                }
            }
        }
        Ok(())
    }

    fn finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish_reason.is_some())
    }

    fn usage(&self) -> Usage {
        let prompt_tokens = self.request.prompts.iter().map(Vec::len).sum();
        let last_prompt = self.request.prompts.last().map_or(0, Vec::len);
        let full = last_prompt / self.block_size * self.block_size;
        let rejected = self.completion_tokens == 0;
        Usage {
            prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
            created_cache_tokens: match rejected {
                true => 0,
                false => full.saturating_sub(self.cached_tokens),
            },
        }
    }

    /// Of a batch only the first hand-off is returned, as by the real engine.
    fn whole(&mut self) -> Value {
        let hand_off = self.choices.first_mut().and_then(|choice| choice.hand_off.take());
        let faults = &self.faults;
        let hand_off = hand_off.filter(|_| !faults.no_hand_off);
        let params =
            hand_off.map(|hand_off| match (faults.short_hand_off, faults.foreign_hand_off) {
                (true, _) => hand_off.shortened().to_json(),
                (false, true) => hand_off.of_a_stranger().to_json(),
                (false, false) => hand_off.to_json(),
            });
        let ids = self.request.return_token_ids;
        let per_prompt = self.choices.len() / self.request.prompts.len();
        let prompt_ids = |index: usize| {
            let mut ids = self.request.prompts[index / per_prompt].clone();
            ids[0] ^= u32::from(self.faults.other_prompt_ids);
            ids
        };
        let choices: Vec<ReplyChoice> = self
            .choices
            .iter_mut()
            .enumerate()
            .map(|(index, progress)| ReplyChoice {
                text: std::mem::take(&mut progress.text),
                finish_reason: progress.finish_reason,
                stop_reason: progress.stop_reason.take(),
                token_ids: ids.then(|| std::mem::take(&mut progress.token_ids)),
                prompt_token_ids: ids.then(|| prompt_ids(index)),
            })
            .collect();
        self.shape.whole(&choices, self.usage(), params)
    }

    /// The text that may be sent: the possible beginning of a stop string is held back.
    fn releasable(&mut self, choice: usize) -> String {
        let stops = &self.request.samples[choice].stops;
        let longest = stops.iter().map(String::len).max().unwrap_or(1);
        let progress = &mut self.choices[choice];
        if progress.finish_reason.is_some() {
            return std::mem::take(&mut progress.text);
        }
        // Generated text is ASCII, so every index is a character boundary.
        let ready = progress.text.len().saturating_sub(longest - 1);
        progress.text.drain(..ready).collect()
    }

    /// The stream's events for the last output.
    fn events(&mut self, choice: usize) -> Vec<Bytes> {
        match self.shape.endpoint.names_events() {
            true => self.named_events(choice),
            false => self.chunks(choice).iter().map(event).collect(),
        }
    }

    /// The same for streams with named events, which have only one choice.
    fn named_events(&mut self, choice: usize) -> Vec<Bytes> {
        let text = self.releasable(choice);
        let usage = self.usage();
        let progress = &mut self.choices[choice];
        let first_text = progress.sent_text.is_empty() && !text.is_empty();
        let opens = match self.shape.endpoint {
            Endpoint::Messages => !std::mem::replace(&mut progress.given_any, true),
            _ => first_text,
        };
        progress.sent_text += &text;
        let shape = &self.shape;
        let mut events = if opens { shape.opening_events(usage, first_text) } else { Vec::new() };
        if !text.is_empty() {
            events.extend(shape.text_events(&text, first_text));
        }
        self.numbered(events)
    }

    fn numbered(&mut self, events: Vec<Value>) -> Vec<Bytes> {
        let from = self.events;
        self.events += events.len() as u64;
        events.into_iter().zip(from..).map(|(event, at)| self.shape.named(event, at)).collect()
    }

    /// The events before the engine has started the request.
    fn first_events(&mut self) -> Vec<Bytes> {
        let events = self.shape.first_events();
        self.numbered(events)
    }

    /// The events that end the stream.
    fn last_events(&mut self) -> Vec<Bytes> {
        if self.shape.endpoint.names_events() {
            let progress = &mut self.choices[0];
            let choice = ReplyChoice {
                text: std::mem::take(&mut progress.sent_text),
                finish_reason: progress.finish_reason,
                stop_reason: progress.stop_reason.take(),
                ..ReplyChoice::default()
            };
            let events = self.shape.closing_events(&choice, self.usage());
            return self.numbered(events);
        }
        let usage = self.request.include_usage.then(|| self.shape.usage_chunk(self.usage()));
        let done = Bytes::from_static(b"data: [DONE]\n\n");
        let done = Some(done).filter(|_| !self.faults.no_done);
        usage.iter().map(event).chain(done).collect()
    }

    /// The stream's chunks for the last output.
    fn chunks(&mut self, choice: usize) -> Vec<Value> {
        let chat = self.shape.endpoint == Endpoint::Chat;
        let per_prompt = self.choices.len() / self.request.prompts.len();
        // In `/inference/v1/generate`, tokens may be sent while their text is held back.
        let tokens_only = self.shape.endpoint == Endpoint::Generate;
        let text = self.releasable(choice);
        let ids = self.request.return_token_ids;
        let progress = &mut self.choices[choice];
        let ended = progress.finish_reason.is_some();
        let first = !std::mem::replace(&mut progress.given_any, true);
        let prompt_token_ids =
            (ids && first).then(|| self.request.prompts[choice / per_prompt].clone());
        let mut body = ReplyChoice {
            text,
            finish_reason: progress.finish_reason,
            stop_reason: progress.stop_reason.clone(),
            token_ids: ids.then(|| std::mem::take(&mut progress.token_ids)),
            prompt_token_ids,
        };
        let mut chunks = Vec::new();
        let rejected = progress.finish_reason == Some("cache_threshold");
        let opens = match rejected {
            true => self.shape.threshold_reply == ThresholdReply::AfterOpening,
            false => chat,
        };
        if first && opens {
            let prompt_token_ids = body.prompt_token_ids.take();
            let opening = ReplyChoice { prompt_token_ids, ..ReplyChoice::default() };
            chunks.push(self.shape.chunk(choice, &opening, chat));
        }
        if !body.text.is_empty() || ended || tokens_only {
            chunks.push(self.shape.chunk(choice, &body, chat && rejected));
        }
        if self.request.continuous_usage {
            let usage = Shape::plain_usage(self.usage());
            for chunk in &mut chunks {
                chunk["usage"] = usage.clone();
            }
        }
        chunks
    }
}

impl Progress {
    fn end(&mut self, end: End) {
        self.finish_reason = Some(end.reason.as_str());
        self.hand_off = end.hand_off;
        if let (FinishReason::Stop, Some(stop)) = (end.reason, end.stop) {
            let kept = self.text.len().saturating_sub(stop.len());
            self.text.truncate(kept);
            self.stop_reason = Some(stop);
        }
    }
}

/// Waits for the end and returns one body.
pub(crate) async fn whole(
    mut submission: Submission,
    mut pending: PendingReply,
) -> Result<Response, ApiError> {
    while !pending.finished() {
        let Some((choice, output)) = submission.next().await else {
            break;
        };
        pending.take(choice, output)?;
    }
    let body = pending.whole();
    let faults = &pending.faults;
    if faults.die_after_chunks.is_none() && !faults.truncate {
        return Ok(json_response(StatusCode::OK, &body));
    }
    let mut half = body.to_string().into_bytes();
    half.truncate(half.len() / 2);
    let content_type = [(header::CONTENT_TYPE, "application/json")];
    if faults.truncate {
        return Ok((content_type, half).into_response());
    }
    let parts = stream::once(async move { Ok(Bytes::from(half)) });
    let parts = parts.chain(stream::once(async { Err(cut().await) }));
    Ok((content_type, Body::from_stream(parts)).into_response())
}

/// Returns server-sent events.
pub(crate) async fn streamed(
    mut submission: Submission,
    mut pending: PendingReply,
    early_headers: bool,
) -> Result<Response, ApiError> {
    let mut ready = VecDeque::from(pending.first_events());
    if !early_headers && ready.is_empty() {
        // The status depends on the transfers' results, or otherwise on the first output.
        let pulls =
            pending.request.samples.iter().any(|params| matches!(params.remote, RemoteKv::Pull(_)));
        let mut awaited = if pulls { pending.choices.len() } else { 1 };
        while awaited > 0 {
            let Some((choice, output)) = submission.next().await else {
                break;
            };
            awaited -= usize::from(matches!(output, Output::Started { .. }));
            let started = matches!(output, Output::Started { .. });
            pending.take(choice, output)?;
            if !started {
                ready.extend(pending.events(choice));
            }
        }
    }
    let chunks_left = pending.faults.die_after_chunks;
    let state = StreamedReply { submission, pending, ready, chunks_left, closing: false };
    let body = stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        match state.next().await {
            Some(Ok(bytes)) => Some((Ok(bytes), Some(state))),
            Some(Err(error)) => Some((Err(error), None)),
            None => None,
        }
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
    Ok((headers, Body::from_stream(body)).into_response())
}

#[derive(Debug)]
struct StreamedReply {
    submission: Submission,
    pending: PendingReply,
    ready: VecDeque<Bytes>,
    /// Number of chunks until the connection is cut.
    chunks_left: Option<usize>,
    /// Whether the end has been put into `ready`.
    closing: bool,
}

impl StreamedReply {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        while self.ready.is_empty() {
            if self.closing {
                return None;
            }
            self.advance().await;
        }
        if let Some(left) = &mut self.chunks_left {
            if *left == 0 {
                return Some(Err(cut().await));
            }
            *left -= 1;
        }
        self.ready.pop_front().map(Ok)
    }

    /// Handles one output, or ends the stream if there are no more.
    async fn advance(&mut self) {
        if !self.pending.finished()
            && let Some((choice, output)) = self.submission.next().await
        {
            let started = matches!(output, Output::Started { .. });
            match self.pending.take(choice, output) {
                Ok(()) if started => {}
                Ok(()) => self.ready.extend(self.pending.events(choice)),
                Err(error) => self.fail(&error),
            }
            return;
        }
        self.ready.extend(self.pending.last_events());
        self.closing = true;
    }

    /// An error after the headers; for a response, the real engine sends nothing and aborts.
    fn fail(&mut self, error: &ApiError) {
        match self.pending.shape.endpoint {
            Endpoint::Responses => {
                self.chunks_left = Some(self.ready.len());
                self.ready.push_back(Bytes::new()); // never sent
            }
            Endpoint::Messages => {
                let told = json!({"type": "internal_error", "message": error.message});
                let told = json!({"type": "error", "error": told});
                self.ready.push_back(self.pending.shape.named(told, 0));
            }
            _ => {
                let done = Bytes::from_static(b"data: [DONE]\n\n");
                self.ready.extend([event(&error.body()), done]);
            }
        }
        self.closing = true;
    }
}

fn event(body: &Value) -> Bytes {
    Bytes::from(format!("data: {body}\n\n"))
}

/// Cuts the connection after everything before it was sent: the server flushes when the body has
/// nothing more for the moment, but not when the body fails.
pub(super) async fn cut() -> io::Error {
    tokio::task::yield_now().await;
    io::Error::new(io::ErrorKind::ConnectionReset, "cut by a fault")
}
