//! The text of a recording: `/v1/audio/transcriptions` and `/v1/audio/translations`. Takes forms only as
//! Splitrail writes them, with fields that the engine knows.

use std::io;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value, json};

use super::reply::cut;
use super::request_body::read_model;
use crate::adapters::Adapters;
use crate::config::{KvConnector, SimConfig};
use crate::error::{ApiError, json_response};
use crate::faults::RequestFaults;

pub(super) const PATHS: [&str; 2] = ["/v1/audio/transcriptions", "/v1/audio/translations"];

/// Bytes of a second of a recording.
const BYTES_PER_SECOND: usize = 32_000;

/// The fields of vLLM 0.32 and of OpenAI's API, besides `file`.
const FIELDS: [&str; 30] = [
    "chunking_strategy",
    "include[]",
    "keywords[]",
    "languages[]",
    "known_speaker_names[]",
    "known_speaker_references[]",
    "model",
    "max_completion_tokens",
    "language",
    "to_language",
    "hotwords",
    "prompt",
    "response_format",
    "timestamp_granularities[]",
    "stream",
    "stream_include_usage",
    "stream_continuous_usage_stats",
    "vllm_xargs",
    "use_beam_search",
    "n",
    "length_penalty",
    "include_stop_str_in_output",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "repetition_penalty",
    "presence_penalty",
];

/// A form: its texts, as strings and lists of strings, and its file.
pub(super) struct Form {
    fields: Map<String, Value>,
    file_name: String,
    file: Bytes,
}

impl Form {
    fn text(&self, name: &str) -> &str {
        self.fields.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// The form for tests: the file's name and its hash.
    pub(super) fn recorded(&self) -> Value {
        let mut all = self.fields.clone();
        all.insert("file".into(), json!([self.file_name, hash(&self.file)]));
        Value::Object(all)
    }
}

fn hash(bytes: &[u8]) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(bytes))
}

/// Reads a form byte for byte as Splitrail writes it.
pub(super) fn form(headers: &HeaderMap, body: &Bytes) -> Result<Form, ApiError> {
    let wrong = |what: &str| ApiError::bad_request("file", format!("not a good form: {what}"));
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let boundary = kind.and_then(|kind| kind.strip_prefix("multipart/form-data; boundary="));
    let boundary = boundary.filter(|boundary| boundary.len() == 32).ok_or_else(|| wrong("type"))?;
    let (open, close) = (format!("--{boundary}\r\n"), format!("\r\n--{boundary}--\r\n"));
    let inner = body.strip_prefix(open.as_bytes());
    let inner = inner.and_then(|inner| inner.strip_suffix(close.as_bytes()));
    let mut rest = inner.ok_or_else(|| wrong("boundaries"))?;
    let mut fields = Map::new();
    loop {
        let head_end = find(rest, b"\r\n\r\n").ok_or_else(|| wrong("head"))?;
        let (head, content) = (&rest[..head_end], &rest[head_end + 4..]);
        let head = std::str::from_utf8(head).map_err(|_| wrong("head"))?;
        let name = head.strip_prefix("Content-Disposition: form-data; name=\"");
        let (name, more) =
            name.and_then(|name| name.split_once('"')).ok_or_else(|| wrong("disposition"))?;
        if name == "file" {
            let file_name = more
                .strip_prefix("; filename=\"")
                .and_then(|more| more.strip_suffix("\"\r\nContent-Type: application/octet-stream"))
                .ok_or_else(|| wrong("file"))?;
            if find(content, boundary.as_bytes()).is_some() {
                return Err(wrong("the file is not the last part"));
            }
            let (file_name, file) = (file_name.to_owned(), body.slice_ref(content));
            return Ok(Form { fields, file_name, file });
        }
        let next = format!("\r\n{open}");
        let end = find(content, next.as_bytes()).ok_or_else(|| wrong("field"))?;
        let text = std::str::from_utf8(&content[..end]).map_err(|_| wrong("text"))?;
        match (name.ends_with("[]"), more.is_empty(), fields.get_mut(name)) {
            (_, false, _) => return Err(wrong("disposition")),
            (true, _, Some(Value::Array(texts))) => texts.push(text.into()),
            (true, ..) => drop(fields.insert(name.into(), json!([text]))),
            (_, _, None) => drop(fields.insert(name.into(), text.into())),
            _ => return Err(wrong("a field comes twice")),
        }
        rest = &content[end + next.len()..];
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

/// Refuses what the engine does not know, and what only the router may send.
fn check(form: &Form, config: &SimConfig, adapters: &Adapters) -> Result<(), ApiError> {
    read_model(&Value::Object(form.fields.clone()), config, adapters)?;
    if let Some(name) = form.fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
        return Err(ApiError::bad_request("fields", format!("there is no field {name}.")));
    }
    let extensions: Value = match form.text("vllm_xargs") {
        "" => Value::Null,
        text => serde_json::from_str(text)
            .map_err(|_| ApiError::bad_request("vllm_xargs", "vllm_xargs must be JSON."))?,
    };
    if !extensions["kv_transfer_params"].is_null() {
        return Err(ApiError::bad_request("kv_transfer_params", "only the router may say this."));
    }
    if !["", "json", "text", "verbose_json"].contains(&form.text("response_format")) {
        return Err(ApiError::bad_request("response_format", "json, text or verbose_json."));
    }
    Ok(())
}

/// The reply to a form, with this id and date.
pub(super) fn answer(
    form: &Form,
    path: &str,
    config: &SimConfig,
    adapters: &Adapters,
    (id, created): (String, u64),
    faults: &RequestFaults,
) -> Result<Response, ApiError> {
    let is_sglang = config.connector == KvConnector::Sglang;
    if !config.transcribes || is_sglang && path != PATHS[0] {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "Not Found"));
    }
    check(form, config, adapters)?;
    let seconds = form.file.len().div_ceil(BYTES_PER_SECOND);
    let task = if path == PATHS[0] { "heard" } else { "translated" };
    let words = [task, &format!("{} bytes,", form.file.len()), &hash(&form.file), "in all"];
    let format = form.text("response_format");
    if form.text("stream") == "true" {
        if format == "verbose_json" {
            let message = "verbose_json format doesn't support streaming case";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
        }
        return Ok(streamed(form, &words, (id, created), seconds, faults));
    }
    let text = words.join(" ");
    if format == "text" && is_sglang {
        let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
        return Ok((kind, text).into_response());
    }
    let mut reply = json!({"text": text});
    if format == "verbose_json" {
        reply["language"] = form.text("language").into();
        reply["duration"] = seconds.into();
        reply["segments"] = json!([{"id": 0, "start": 0.0, "end": seconds, "text": text}]);
    } else if path == PATHS[0] {
        reply["usage"] = json!({"type": "duration", "seconds": seconds});
    }
    Ok(json_response(StatusCode::OK, &reply))
}

/// The words as chunks, in two pieces of the recording, each of which ends like a reply.
fn streamed(
    form: &Form,
    words: &[&str],
    (id, created): (String, u64),
    seconds: usize,
    faults: &RequestFaults,
) -> Response {
    let chunk = |choices: Value| {
        let object = "transcription.chunk";
        json!({"id": id, "object": object, "created": created, "model": form.text("model"),
            "choices": choices})
    };
    let mut events: Vec<String> = Vec::new();
    for (place, word) in words.iter().enumerate() {
        let space = if place == 0 { "" } else { " " };
        let mut choice = json!({"delta": {"content": format!("{space}{word}")}});
        if place % 2 == 1 {
            choice["finish_reason"] = "stop".into();
            choice["stop_reason"] = Value::Null;
        }
        events.push(chunk(json!([choice])).to_string());
    }
    if form.text("stream_include_usage") == "true" {
        let (prompt, completion) = (4 + 50 * seconds, words.len());
        let mut usage = chunk(json!([]));
        usage["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": completion,
            "total_tokens": prompt + completion});
        events.push(usage.to_string());
    }
    if !faults.no_done {
        events.push("[DONE]".into());
    }
    let die_after = faults.die_after_chunks;
    let events = events.into_iter().enumerate();
    let body = stream::unfold(events, move |mut events| async move {
        let (place, event) = events.next()?;
        let event = match die_after {
            Some(after) if place >= after => Err(cut().await),
            _ => Ok::<_, io::Error>(Bytes::from(format!("data: {event}\n\n"))),
        };
        Some((event, events))
    });
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(body))
        .into_response()
}
