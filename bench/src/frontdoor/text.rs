//! Prompts of natural text: sentences of the project's own documents in random order.

use bytes::Bytes;
use prost::Message;
use serde_json::json;
use splitrail_proto::v1;

use super::MODEL;
use super::mock::SLOW;

/// Where the sentences are from.
const DOCUMENTS: [&str; 6] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../docs/configuration.md"),
    include_str!("../../../docs/metrics.md"),
    include_str!("../../README.md"),
];

/// Prompts that begin alike: so many kinds of beginnings.
pub(super) const GROUPS: usize = 8;

/// A size of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// As rows show it.
    pub(super) name: &'static str,
    /// Bytes of text, shared and own.
    pub(super) bytes: usize,
}

/// Different prompts of a size, which are sent in turn: of all their own parts, a router that
/// remembers text in some megabytes has none when it comes again.
const PROMPTS: usize = 4096;

/// The sizes that are measured.
pub(super) const SIZES: [Size; 2] =
    [Size { name: "1 KB", bytes: 1 << 10 }, Size { name: "64 KB", bytes: 64 << 10 }];

/// One prompt: three quarters are its group's, the rest is its own.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    /// Its group.
    pub(super) group: usize,
    /// What it shares.
    pub(super) shared: String,
    /// What it does not.
    pub(super) own: String,
}

impl Prompt {
    /// A chat of a system prompt and a question.
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

    /// A chat that is answered with so many tokens, as a stream with usage or whole.
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

    /// The same chat as a gRPC message with its prefix. Its answer is always a stream.
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
        // Not compressed, and its length.
        [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat().into()
    }

    /// A chat whose reply continues until its client disconnects.
    pub(super) fn slow(&self) -> String {
        let chat = self.chat(true);
        let open = chat.strip_suffix('}').unwrap_or(&chat);
        format!("{open},{}}}", String::from_utf8_lossy(SLOW))
    }
}

/// Sentences to make prompts of.
pub(super) struct Text {
    sentences: Vec<&'static str>,
}

impl Text {
    /// Cuts the documents up.
    pub(super) fn new() -> Self {
        let lines = DOCUMENTS.iter().flat_map(|document| document.lines());
        let sentences = lines.flat_map(|line| line.split_inclusive(". "));
        Self { sentences: sentences.filter(|sentence| sentence.len() > 24).collect() }
    }

    /// The prompts of a size, all groups in turn.
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

    /// About so many bytes of text; the same for the same seed.
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

/// The finalizer of SplitMix64.
pub(super) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
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
