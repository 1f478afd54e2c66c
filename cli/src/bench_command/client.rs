//! Closed-loop clients: each sends its next request when the stream before it has ended.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;
use splitrail_engine::sse::{Piece, Splitter};
use tokio::task::JoinSet;

use super::prompts::Prompt;

/// Maximum length of an event in bytes.
const EVENT_MAX_BYTES: usize = 1 << 20;
/// Maximum length of an error in bytes.
const ERROR_MAX_BYTES: usize = 64 << 10;

/// What came of a request: the figures of its reply, or a short name of its failure.
pub(super) type Outcome = Result<Served, String>;

/// The figures of a complete reply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Served {
    /// Nanoseconds from the request to the first token.
    pub(super) ttft_ns: u64,
    /// Mean nanoseconds between tokens, if there were several.
    pub(super) inter_token_ns: Option<u64>,
    /// Prompt tokens.
    pub(super) prompt_tokens: u64,
    /// Those of them that came from a cache.
    pub(super) cached_tokens: u64,
}

/// The load of one turn.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    /// The router.
    pub(super) address: SocketAddr,
    /// The model.
    pub(super) model: &'a str,
    /// Tokens per block of the prompts.
    pub(super) block_tokens: u32,
    /// Determines the tokens of the prompts.
    pub(super) seed: u64,
}

impl Load<'_> {
    /// Sends all prompts in their order, at most `concurrency` at the same time. Calls `progress` with
    /// the number of requests that have ended.
    pub(super) async fn run(
        self,
        prompts: &[Prompt],
        concurrency: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Vec<Outcome> {
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let mut left = prompts.iter().enumerate();
        let (mut running, mut outcomes) = (JoinSet::new(), Vec::with_capacity(prompts.len()));
        loop {
            while running.len() < concurrency
                && let Some((number, prompt)) = left.next()
            {
                running.spawn(exchange(client.clone(), self.request(prompt, number)));
            }
            let Some(ended) = running.join_next().await else { return outcomes };
            outcomes.push(ended.unwrap_or_else(|_| Err("defect".to_owned())));
            progress(outcomes.len());
        }
    }

    fn request(&self, prompt: &Prompt, number: usize) -> Request<Full<Bytes>> {
        let body = json!({
            "model": self.model, "prompt": prompt.tokens(self.block_tokens, self.seed, number),
            "max_tokens": prompt.output_tokens, "ignore_eos": true, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let mut request = Request::new(Full::new(body.to_string().into()));
        *request.method_mut() = http::Method::POST;
        let uri = format!("http://{}/v1/completions", self.address);
        // An address and a path are always a valid URI.
        *request.uri_mut() = uri.parse().unwrap_or_default();
        let json = http::HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        request
    }
}

async fn exchange(
    client: Client<HttpConnector, Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Outcome {
    let sent = Instant::now();
    let reply = client.request(request).await.map_err(|_| "connection".to_owned())?;
    if reply.status() != StatusCode::OK {
        return Err(refusal(reply).await);
    }
    let mut reading = Reading { sent, first: None, last: sent, ended: false, usage: None };
    let (mut body, mut splitter) = (reply.into_body(), Splitter::new(EVENT_MAX_BYTES));
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| "connection".to_owned())?.into_data() else { continue };
        splitter.push(&data);
        while let Some(piece) = splitter.next_piece().map_err(|_| "malformed".to_owned())? {
            match piece {
                Piece::Data(data) => reading.event(&data)?,
                Piece::Done => reading.ended = true,
                Piece::Comment(_) => {}
            }
        }
    }
    reading.end()
}

/// The code of an error.
async fn refusal(reply: http::Response<Incoming>) -> String {
    let status = reply.status();
    let body = Limited::new(reply.into_body(), ERROR_MAX_BYTES).collect().await;
    let told = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
    told.map_or_else(|| status.as_str().to_owned(), Chunk::code)
}

/// The members of an event, or of an error, that are read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<ErrorObject>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorObject {
    code: Option<String>,
}

impl Chunk {
    fn code(self) -> String {
        self.error.and_then(|error| error.code).unwrap_or_else(|| "error".to_owned())
    }
}

/// A stream as far as it has been read.
struct Reading {
    sent: Instant,
    first: Option<Instant>,
    last: Instant,
    ended: bool,
    usage: Option<Usage>,
}

impl Reading {
    fn event(&mut self, data: &[u8]) -> Result<(), String> {
        let chunk: Chunk = serde_json::from_slice(data).map_err(|_| "malformed".to_owned())?;
        if chunk.error.is_some() {
            return Err(chunk.code());
        }
        if !chunk.choices.is_empty() {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        }
        self.usage = chunk.usage.or(self.usage);
        Ok(())
    }

    fn end(self) -> Outcome {
        let (true, Some(first), Some(usage)) = (self.ended, self.first, self.usage) else {
            return Err("incomplete".to_owned());
        };
        let gaps = usage.completion_tokens.saturating_sub(1);
        let nanoseconds = |from: Instant, to: Instant| (to - from).as_nanos() as u64;
        let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
        Ok(Served {
            ttft_ns: nanoseconds(self.sent, first),
            inter_token_ns: nanoseconds(first, self.last).checked_div(gaps),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: cached.unwrap_or_default(),
        })
    }
}
