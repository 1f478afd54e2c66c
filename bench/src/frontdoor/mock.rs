//! Mock engines that reply at once, so that only the programs in front of them are measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Failure, MODEL};

/// The metrics of an engine of vLLM 0.32.0.
const METRICS: &str =
    include_str!("../../../crates/engine/tests/fixtures/vllm-0.32.0/metrics/a_after.txt");
/// Number of chunks of a streamed reply.
pub(super) const CHUNKS: usize = 64;
/// The member of a request's body that asks for a stream without end. No real engine knows it.
pub(super) const SLOW: &[u8] = b"\"slow\":true";
/// The member of a request's body that asks for a single token.
const ONE_TOKEN: &[u8] = b"\"max_completion_tokens\":1,";
/// The texts of the chunks in turn, escaped for JSON. No chunk is equal to the one before it.
const WORDS: [&str; 16] = [
    "The", " router", " asks", " one", " of", " them", ",", " and", " waits", " for", " its",
    " answer", ".", r"\n\n", r#"\"So"#, " it",
];
/// Interval between two chunks of a stream without end.
const SLOW_INTERVAL: Duration = Duration::from_secs(2);
/// The members that distinguish kinds of requests are within this many bytes of a body's beginning
/// or end.
const EDGE_BYTES: usize = 1024;
/// Bytes of a prompt per block id of a hand-off: 16 tokens of 4 bytes.
const BYTES_PER_BLOCK: usize = 16 * 4;

/// A running engine. It ends when it is dropped.
pub(super) struct Mock {
    /// The address of its listener.
    pub(super) address: SocketAddr,
    _tasks: JoinSet<()>,
}

/// The replies to chats. They contain no number of cached tokens, because a number that the
/// router's index does not expect would count as drift of the engine.
struct Replies {
    /// A whole reply.
    whole: Vec<u8>,
    /// The chunks of a streamed reply.
    chunks: Vec<Vec<u8>>,
    /// The chunk with the usage, after the other chunks.
    usage_chunk: Vec<u8>,
    /// A complete streamed reply of one chunk, with usage.
    one_token: Vec<u8>,
}

/// The head of a streamed reply.
const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

impl Mock {
    /// Starts an engine.
    ///
    /// # Errors
    /// No port is free.
    pub(super) async fn start() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let replies = Arc::new(Replies::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let replies = Arc::clone(&replies);
                connections.spawn(async move {
                    // The client may close the connection at any time.
                    let _gone = serve(stream, &replies).await;
                });
            }
        });
        Ok(Self { address, _tasks: tasks })
    }
}

async fn serve(mut stream: TcpStream, replies: &Replies) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(128 << 10);
    loop {
        let head_end = loop {
            if let Some(at) = find(&buffer, b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buffer[..head_end]).to_ascii_lowercase();
        let end = head_end + content_length(&head);
        if head.contains("expect: 100-continue") {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        while buffer.len() < end {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        match head.strip_prefix("get ") {
            Some(path) => stream.write_all(&status_reply(path)).await?,
            None => complete(&mut stream, replies, &buffer[head_end..end]).await?,
        }
        buffer.drain(..end);
    }
}

/// Replies to a chat.
async fn complete(stream: &mut TcpStream, replies: &Replies, body: &[u8]) -> std::io::Result<()> {
    let edge = body.len().min(EDGE_BYTES);
    let contains = |what: &[u8]| {
        let (begin, end) = (&body[..edge], &body[body.len() - edge..]);
        find(begin, what).is_some() || find(end, what).is_some()
    };
    if contains(b"\"do_remote_decode\":true") || contains(b"\"do_remote_decode\": true") {
        return stream.write_all(&prefill_reply(body.len() / BYTES_PER_BLOCK + 1)).await;
    }
    if !contains(b"\"stream\":true") && !contains(b"\"stream\": true") {
        return stream.write_all(&replies.whole).await;
    }
    if contains(ONE_TOKEN) {
        return stream.write_all(&replies.one_token).await;
    }
    stream.write_all(STREAM_HEAD).await?;
    if contains(SLOW) {
        // The stream ends when the client disconnects.
        for chunk in replies.chunks[..CHUNKS - 1].iter().cycle() {
            stream.write_all(chunk).await?;
            sleep(SLOW_INTERVAL).await;
        }
    }
    for chunk in &replies.chunks {
        stream.write_all(chunk).await?;
    }
    if contains(b"include_usage") {
        stream.write_all(&replies.usage_chunk).await?;
    }
    stream.write_all(&framed("data: [DONE]\n\n")).await?;
    stream.write_all(b"0\r\n\r\n").await
}

impl Replies {
    fn new() -> Self {
        let usage = r#""usage":{"prompt_tokens":250,"total_tokens":266,"completion_tokens":16,"prompt_tokens_details":null}"#;
        let head = format!(
            r#""id":"chatcmpl-7d4f0d2c9a1b4e5f8a6b","created":1785000000,"model":"{MODEL}""#
        );
        let whole = format!(
            r#"{{{head},"object":"chat.completion","choices":[{{"index":0,"message":{{"role":"assistant","content":"The router places the prompt where most of its blocks are.","refusal":null,"tool_calls":[]}},"logprobs":null,"finish_reason":"length","stop_reason":null}}],"service_tier":null,"system_fingerprint":null,{usage},"prompt_logprobs":null,"kv_transfer_params":null}}"#
        );
        let chunk = |text: &str, end: &str| {
            framed(&format!(
                "data: {{{head},\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":{end}}}]}}\n\n"
            ))
        };
        let usage_chunk = framed(&format!(
            "data: {{{head},\"object\":\"chat.completion.chunk\",\"choices\":[],{usage}}}\n\n"
        ));
        let last = |at| if at + 1 == CHUNKS { "\"length\"" } else { "null" };
        let chunks = (0..CHUNKS).map(|at| chunk(WORDS[at % WORDS.len()], last(at)));
        let chunks: Vec<Vec<u8>> = chunks.collect();
        let done = framed("data: [DONE]\n\n");
        let one_token =
            [STREAM_HEAD, &chunks[CHUNKS - 1], &usage_chunk, &done, b"0\r\n\r\n"].concat();
        Self { whole: reply("application/json", &whole), chunks, usage_chunk, one_token }
    }
}

/// The reply to a prefill leg, with a NIXL hand-off of `blocks` blocks.
fn prefill_reply(blocks: usize) -> Vec<u8> {
    let ids: Vec<String> = (0..blocks).map(|id| (id + 7).to_string()).collect();
    let body = format!(
        r#"{{"id":"chatcmpl-p","object":"chat.completion","created":1785000000,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":"The"}},"logprobs":null,"finish_reason":"length","stop_reason":null}}],"usage":{{"prompt_tokens":250,"total_tokens":251,"completion_tokens":1,"prompt_tokens_details":null}},"kv_transfer_params":{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[{}]],"remote_engine_id":"4f2f5a7e-engine","remote_request_id":"chatcmpl-p","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}}}"#,
        ids.join(",")
    );
    reply("application/json", &body)
}

/// The reply to a request without a body, which asks for the engine's identity, health or load.
fn status_reply(path: &str) -> Vec<u8> {
    let path = path.split_whitespace().next().unwrap_or_default();
    match path {
        "/metrics" => {
            reply("text/plain", &METRICS.replace("block_size=\"32\"", "block_size=\"16\""))
        }
        "/version" => reply("application/json", r#"{"version": "0.32.0"}"#),
        "/v1/models" => reply(
            "application/json",
            &format!(
                r#"{{"object": "list", "data": [{{"id": "{MODEL}", "object": "model", "created": 0, "owned_by": "vllm", "root": "{MODEL}", "parent": null, "max_model_len": 131072}}]}}"#
            ),
        ),
        _ => reply("text/plain", ""),
    }
}

fn reply(kind: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A chunk in the framing of HTTP/1.1.
fn framed(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

/// The content length in the head of a message, which is in lower case; 0 if there is none.
pub(super) fn content_length(head: &str) -> usize {
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.and_then(|length| length.trim().parse().ok()).unwrap_or(0)
}

/// The place of the first occurrence of a word.
pub(super) fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|part| part == word)
}
