//! Prompts of natural text: sentences of this project's documents in random order.

use bytes::Bytes;
use prost::Message;
use serde_json::json;
use splitrail_proto::v1;

use super::MODEL;
use super::mock::SLOW;
use crate::splitmix::mix;

/// The documents from which the sentences are taken.
const DOCUMENTS: [&str; 6] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../docs/configuration.md"),
    include_str!("../../../docs/metrics.md"),
    include_str!("../../README.md"),
];

/// Number of groups of prompts. The prompts of a group have their beginning in common.
pub(super) const GROUPS: usize = 8;

/// A size of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// The name in rows.
    pub(super) name: &'static str,
    /// Number of bytes of text, the shared part included.
    pub(super) bytes: usize,
}

/// Number of different prompts of a size, which are sent in turn. When a prompt is sent again, a
/// router that remembers some megabytes of text has forgotten the prompt's own part.
const PROMPTS: usize = 4096;

/// The sizes that are measured.
pub(super) const SIZES: [Size; 2] =
    [Size { name: "1 KB", bytes: 1 << 10 }, Size { name: "64 KB", bytes: 64 << 10 }];

/// One prompt. Three quarters are shared by its group, the rest is its own.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    /// The number of the group.
    pub(super) group: usize,
    /// The part that all prompts of the group begin with.
    pub(super) shared: String,
    /// The part that no other prompt has.
    pub(super) own: String,
}

impl Prompt {
    /// A chat with the shared part as the system message and the own part as the user's.
    pub(super) fn chat(&self, streams: bool) -> String {
        json!({
            "model": MODEL,
            "stream": streams,
            "messages": [
                {"role": "system", "content": self.shared},
                {"role": "user", "content": self.own},
            ],
            "max_tokens": 16,
        })
        .to_string()
    }

    /// A chat whose reply has `tokens` tokens, and is a stream with usage or whole.
    pub(super) fn limited(&self, streams: bool, tokens: u32) -> String {
        let mut chat = json!({
            "model": MODEL,
            "messages": [
                {"role": "system", "content": self.shared},
                {"role": "user", "content": self.own},
            ],
            "max_completion_tokens": tokens,
            "stream": streams,
        });
        if streams {
            chat["stream_options"] = json!({"include_usage": true});
        }
        chat.to_string()
    }

    /// The chat as a gRPC message with its prefix. Its reply is always a stream.
    pub(super) fn message(&self, tokens: u32) -> Bytes {
        let message = |role: &str, content: &str| v1::ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
            ..Default::default()
        };
        let messages = vec![message("system", &self.shared), message("user", &self.own)];
        let sampling = v1::SamplingParams { max_tokens: Some(tokens), ..Default::default() };
        let request = v1::GenerateRequest {
            model: MODEL.to_owned(),
            prompt: Some(v1::generate_request::Prompt::Chat(v1::Chat { messages })),
            sampling: Some(sampling),
            ..Default::default()
        };
        let message = request.encode_to_vec();
        // The prefix: 0 for "not compressed", and the length.
        [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat().into()
    }

    /// A chat whose reply continues until its client disconnects.
    pub(super) fn slow(&self) -> String {
        let chat = self.chat(true);
        let open = chat.strip_suffix('}').unwrap_or(&chat);
        format!("{open},{}}}", String::from_utf8_lossy(SLOW))
    }
}

/// The sentences of which prompts are made.
pub(super) struct Text {
    sentences: Vec<&'static str>,
}

impl Text {
    /// Divides the documents into sentences.
    pub(super) fn new() -> Self {
        let lines = DOCUMENTS.iter().flat_map(|document| document.lines());
        let sentences = lines.flat_map(|line| line.split_inclusive(". "));
        Self { sentences: sentences.filter(|sentence| sentence.len() > 24).collect() }
    }

    /// All prompts of a size. The groups take turns.
    pub(super) fn prompts(&self, size: Size) -> Vec<Prompt> {
        let shared_bytes = size.bytes / 4 * 3;
        let shared: Vec<String> =
            (0..GROUPS as u64).map(|group| self.prose(group + 1, shared_bytes)).collect();
        let prompt = |number: usize| {
            let seed = (size.bytes as u64) << 32 | (number as u64 + 1000);
            let group = number % GROUPS;
            Prompt {
                group,
                shared: shared[group].clone(),
                own: self.prose(seed, size.bytes - shared_bytes),
            }
        };
        (0..PROMPTS).map(prompt).collect()
    }

    /// Text of at most `bytes` bytes, and at most 3 fewer; the same for the same seed.
    fn prose(&self, seed: u64, bytes: usize) -> String {
        let mut draws = (0..).map(|turn: u64| mix(mix(seed) ^ turn));
        let mut text = String::with_capacity(bytes + 4);
        while text.len() < bytes {
            let draw = draws.next().unwrap_or_default();
            text.push_str(self.sentences[(draw % self.sentences.len() as u64) as usize]);
            text.push(' ');
        }
        let end = (0..=bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_what_their_group_shares_and_nothing_else() {
        let prompts = Text::new().prompts(SIZES[0]);
        assert_eq!(prompts.len(), PROMPTS);
        assert_eq!(prompts[0].shared, prompts[GROUPS].shared);
        assert_ne!(prompts[0].shared, prompts[1].shared);
        assert_ne!(prompts[0].own, prompts[GROUPS].own);
        let bytes = prompts[0].shared.len() + prompts[0].own.len();
        assert!((1000..=1024).contains(&bytes), "{bytes}");
    }
}
