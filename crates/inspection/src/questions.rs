//! The questions to one engine. Each has a timeout and a bound on its reply.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::HeaderValue;
use splitrail_api::text::random_id;
use splitrail_engine::EngineKind;
use splitrail_engine::identity::TRIAL_PATH;
use splitrail_engine_client::{EngineClient, NoReply, Question, WholeReply};
use tokio::time::Instant;

use crate::subject::Subject;

pub(crate) mod events;
pub(crate) mod hand_off;
pub(crate) mod reports;
pub(crate) mod shim;
pub(crate) mod tokens;
pub(crate) mod trial;

/// The beginning of the id of each question, by which logs of engines show them.
const ID_PREFIX: &str = "splitrail-check-";
/// Maximum size of replies other than reports, in bytes.
const REPLY_MAX_BYTES: usize = 1 << 20;
/// Maximum time of a question that needs no computation.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time in which an engine serves a small prompt.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The rank whose KV events are awaited.
pub(crate) const FIRST_RANK: u32 = 0;
/// Maximum number of characters of an engine's message or name that is kept.
const TEXT_MAX_CHARS: usize = 200;

/// Asks one engine.
pub(crate) struct Asker<'a> {
    pub(crate) client: &'a EngineClient,
    pub(crate) subject: &'a Subject,
    /// Which engine it is.
    pub(crate) kind: EngineKind,
    /// The end of the whole inspection.
    pub(crate) deadline: Instant,
}

impl Asker<'_> {
    /// The end of a question that is asked now.
    pub(crate) fn until(&self, patience: Duration) -> Instant {
        self.deadline.min(Instant::now() + patience)
    }

    /// Fetches a report.
    pub(crate) async fn get(&self, path: &str, max_bytes: usize) -> Result<WholeReply, NoReply> {
        let request_id = question_id();
        let deadline = self.until(QUESTION_TIMEOUT);
        let (body, rank, request_id) = (None, None, &request_id);
        let question = Question { path, body, rank, request_id, max_bytes, deadline };
        self.client.question(self.subject, question).await
    }

    /// Sends a JSON body that needs no computation.
    pub(crate) async fn post(&self, path: &str, body: String) -> Result<WholeReply, NoReply> {
        let request_id = question_id();
        let deadline = self.until(QUESTION_TIMEOUT);
        let (body, rank, request_id) = (Some(Bytes::from(body)), None, &request_id);
        let max_bytes = REPLY_MAX_BYTES;
        let question = Question { path, body, rank, request_id, max_bytes, deadline };
        self.client.question(self.subject, question).await
    }

    /// Sends the body of a completion under a given id, to a rank if the engine has several.
    pub(crate) async fn complete(
        &self,
        body: String,
        request_id: &HeaderValue,
        rank: u32,
    ) -> Result<WholeReply, NoReply> {
        let deadline = self.until(TRIAL_TIMEOUT);
        let (path, max_bytes) = (TRIAL_PATH, REPLY_MAX_BYTES);
        let (body, rank) = (Some(Bytes::from(body)), Some(rank));
        let question = Question { path, body, rank, request_id, max_bytes, deadline };
        self.client.question(self.subject, question).await
    }
}

impl Asker<'_> {
    /// The engine's message in an error reply, shortened; the beginning of the body if it has none.
    /// A server that repeats what it was sent does not make the credential appear.
    pub(crate) fn error_message(&self, body: &[u8]) -> String {
        let credential = self.client.authorization.as_ref().and_then(|value| value.to_str().ok());
        let key = credential.map(|value| value.trim_start_matches("Bearer "));
        error_message(body, key)
    }
}

fn error_message(body: &[u8], key: Option<&str>) -> String {
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let error = value.get("error").unwrap_or(&value);
    let message = error.get("message").or(value.get("detail")).and_then(|text| text.as_str());
    let message = match message {
        Some(message) => message.to_owned(),
        None => String::from_utf8_lossy(body).into_owned(),
    };
    match key.filter(|key| !key.is_empty()) {
        Some(key) => shortened(&message.replace(key, "[key]")),
        None => shortened(&message),
    }
}

/// A new id for a question, or for both legs of a hand-off.
pub(crate) fn question_id() -> HeaderValue {
    let id = HeaderValue::from_str(&format!("{ID_PREFIX}{}", random_id()));
    id.unwrap_or_else(|_| HeaderValue::from_static("splitrail-check"))
}

/// Why a request got no reply, in a few words.
pub(crate) fn no_reply(why: &NoReply) -> String {
    match why {
        NoReply::Connect { cause, .. } | NoReply::Name { cause } | NoReply::Tls { cause } => {
            shortened(cause)
        }
        NoReply::Outside => "its address is not in fleet.networks".to_owned(),
        NoReply::Closed => "the connection was closed".to_owned(),
        NoReply::NotHttp(malformed) => format!("the peer {malformed}"),
        NoReply::TooLong => "the reply is too long".to_owned(),
        NoReply::Late => "no reply in time".to_owned(),
    }
}

/// The beginning of a text that another process sent.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(TEXT_MAX_CHARS).collect()
}

/// How far a clock is ahead of another one, in whole seconds.
pub(crate) fn ahead_s(theirs: SystemTime, ours: SystemTime) -> i64 {
    let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    match theirs.duration_since(ours) {
        Ok(ahead) => seconds(ahead),
        Err(behind) => -seconds(behind.duration()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_an_engine_is_short_and_has_no_credential() {
        let nested = br#"{"error":{"message":"no such model","code":404}}"#;
        assert_eq!(error_message(nested, None), "no such model");
        assert_eq!(error_message(br#"{"detail":"Not Found"}"#, None), "Not Found");
        assert_eq!(error_message(b"<html>", None), "<html>");
        assert_eq!(error_message(&[0xff; 4096], None).chars().count(), TEXT_MAX_CHARS);
        let echo = br#"{"message":"authorization: Bearer s3cret-s3cret"}"#;
        assert_eq!(error_message(echo, Some("s3cret-s3cret")), "authorization: Bearer [key]");
    }

    #[test]
    fn clocks_are_compared_in_both_directions() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(ahead_s(now + Duration::from_millis(7900), now), 7);
        assert_eq!(ahead_s(now - Duration::from_millis(7900), now), -7);
        assert_eq!(ahead_s(now, now), 0);
    }
}
