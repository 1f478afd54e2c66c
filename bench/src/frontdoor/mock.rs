//! Mock engines that reply immediately, so that only what is in front of them is measured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Failure, MODEL};

/// What an engine of vLLM 0.32.0 shows.
const METRICS: &str =
    include_str!("../../../crates/engine/tests/fixtures/vllm-0.32.0/metrics/a_after.txt");
/// Chunks of a streamed answer.
pub(super) const CHUNKS: usize = 64;
/// What asks for a stream that goes on and on, in a request's body; a member that no engine knows.
pub(super) const SLOW: &[u8] = b"\"slow\":true";
/// What asks for one token only.
const ONE_TOKEN: &[u8] = b"\"max_completion_tokens\":1,";
/// What chunks say in turn, as an engine would write it: no chunk is like the one before it.
const WORDS: [&str; 16] = [
    "The", " router", " asks", " one", " of", " them", ",", " and", " waits", " for", " its",
    " answer", ".", r"\n\n", r#"\"So"#, " it",
];
/// Between the chunks of such a stream.
const PAUSE: Duration = Duration::from_secs(2);
/// What tells the kinds of requests apart stands this close to a body's begin or end.
const EDGE_BYTES: usize = 1024;
/// Tokens per block of a hand-off's block ids, and bytes per token of a prompt.
const BYTES_PER_BLOCK: usize = 16 * 4;

/// A running engine; it ends when this is dropped.
pub(super) struct Mock {
    /// Where it serves.
    pub(super) address: SocketAddr,
    _tasks: JoinSet<()>,
}

/// All that it ever says. It has no cache, and says nothing of one: a figure that the router's
/// index does not expect would count against the engine.
struct Words {
    whole: Vec<u8>,
    chunks: Vec<Vec<u8>>,
    usage_chunk: Vec<u8>,
    /// A streamed answer of one chunk, with usage: all of it at once.
    brief: Vec<u8>,
}

/// What a streamed answer begins with.
const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

impl Mock {
    /// Starts one.
    ///
    /// # Errors
    /// A port that cannot be had.
    pub(super) async fn start() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let words = Arc::new(Words::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let words = Arc::clone(&words);
                connections.spawn(async move {
                    // The client may close the connection at any time.
                    let _gone = serve(stream, &words).await;
                });
            }
        });
        Ok(Self { address, _tasks: tasks })
    }
}

async fn serve(mut stream: TcpStream, words: &Words) -> std::io::Result<()> {
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
            Some(path) => stream.write_all(&told(path)).await?,
            None => answer(&mut stream, words, &buffer[head_end..end]).await?,
        }
        buffer.drain(..end);
    }
}

async fn answer(stream: &mut TcpStream, words: &Words, body: &[u8]) -> std::io::Result<()> {
    let edge = body.len().min(EDGE_BYTES);
    let says = |what: &[u8]| {
        let (begin, end) = (&body[..edge], &body[body.len() - edge..]);
        find(begin, what).is_some() || find(end, what).is_some()
    };
    if says(b"\"do_remote_decode\":true") || says(b"\"do_remote_decode\": true") {
        return stream.write_all(&prefilled(body.len() / BYTES_PER_BLOCK + 1)).await;
    }
    if !says(b"\"stream\":true") && !says(b"\"stream\": true") {
        return stream.write_all(&words.whole).await;
    }
    if says(ONE_TOKEN) {
        return stream.write_all(&words.brief).await;
    }
    stream.write_all(STREAM_HEAD).await?;
    if says(SLOW) {
        // Until the client disconnects.
        for chunk in words.chunks[..CHUNKS - 1].iter().cycle() {
            stream.write_all(chunk).await?;
            sleep(PAUSE).await;
        }
    }
    for chunk in &words.chunks {
        stream.write_all(chunk).await?;
    }
    if says(b"include_usage") {
        stream.write_all(&words.usage_chunk).await?;
    }
    stream.write_all(&framed("data: [DONE]\n\n")).await?;
    stream.write_all(b"0\r\n\r\n").await
}

impl Words {
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
        let brief = [STREAM_HEAD, &chunks[CHUNKS - 1], &usage_chunk, &done, b"0\r\n\r\n"].concat();
        Self { whole: reply("application/json", &whole), chunks, usage_chunk, brief }
    }
}

/// A prefill's answer, with a NIXL hand-off of so many blocks.
fn prefilled(blocks: usize) -> Vec<u8> {
    let ids: Vec<String> = (0..blocks).map(|id| (id + 7).to_string()).collect();
    let body = format!(
        r#"{{"id":"chatcmpl-p","object":"chat.completion","created":1785000000,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":"The"}},"logprobs":null,"finish_reason":"length","stop_reason":null}}],"usage":{{"prompt_tokens":250,"total_tokens":251,"completion_tokens":1,"prompt_tokens_details":null}},"kv_transfer_params":{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[{}]],"remote_engine_id":"4f2f5a7e-engine","remote_request_id":"chatcmpl-p","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}}}"#,
        ids.join(",")
    );
    reply("application/json", &body)
}

/// What an engine tells of itself.
fn told(path: &str) -> Vec<u8> {
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

/// A chunk as HTTP/1.1 frames it.
fn framed(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

/// Of a head in lower case.
pub(super) fn content_length(head: &str) -> usize {
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.and_then(|length| length.trim().parse().ok()).unwrap_or(0)
}

/// Where a word begins.
pub(super) fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|part| part == word)
}
