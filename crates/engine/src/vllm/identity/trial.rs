//! Small requests whose answers show what an engine supports.

use serde_json::json;

use super::Reply;

/// A request of a few tokens that asks for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// Asks that all of the prompt be cached, which can never be, since the last token of
    /// a prompt is always computed. An engine that honours the field turns it away; one
    /// that does not know it generates a token.
    Threshold,
    /// Asks for nothing special: only for what the usage tells.
    Usage,
    /// Asks for a rank that there is not. An engine that knows the header refuses it.
    Rank,
}

/// What a trial has told; `None` for what it has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialOutcome {
    /// Whether the engine honours `cache_hit_threshold`.
    pub honours_threshold: Option<bool>,
    /// Whether its usage tells `cached_tokens`.
    pub reports_cached_tokens: Option<bool>,
    /// Whether a request can be pinned to a rank.
    pub takes_rank_header: Option<bool>,
}

impl Trial {
    /// The body to send, in JSON.
    #[must_use]
    pub fn body(self, model: &str) -> String {
        let mut body =
            json!({"model": model, "prompt": "splitrail", "max_tokens": 1, "temperature": 0});
        if self == Self::Threshold {
            body["cache_hit_threshold"] = 1.0.into();
        }
        body.to_string()
    }

    /// The rank to pin it to, for an engine that has `ranks`.
    #[must_use]
    pub fn rank(self, ranks: u32) -> Option<u32> {
        (self == Self::Rank).then_some(ranks)
    }

    /// Reads an answer. `None` if it tells nothing, so that the engine is to be asked
    /// again: it may be full, or about to stop.
    #[must_use]
    pub fn read(self, status: u16, body: &[u8]) -> Option<TrialOutcome> {
        let reply: Option<Reply<'_>> = serde_json::from_slice(body).ok();
        let mut outcome = TrialOutcome::default();
        match (self, status) {
            (_, 200) => {
                let reply = reply?;
                let turned_away = reply.is_turned_away();
                if !turned_away {
                    outcome.reports_cached_tokens = reply.reports_cached_tokens();
                }
                match self {
                    Self::Threshold => outcome.honours_threshold = Some(turned_away),
                    Self::Rank => outcome.takes_rank_header = Some(false),
                    Self::Usage => {}
                }
            }
            (Self::Threshold, 412) => outcome.honours_threshold = Some(true),
            // vLLM: `data_parallel_rank 1 is out of range [0, 1).`
            (Self::Rank, 400 | 422) if body.windows(4).any(|word| word == b"rank") => {
                outcome.takes_rank_header = Some(true);
            }
            // It does not serve completions, or not so: then nobody can tell.
            (Self::Threshold, 400 | 404 | 405 | 422) => outcome.honours_threshold = Some(false),
            (_, 400 | 404 | 405 | 422) => {}
            _ => return None,
        }
        Some(outcome)
    }
}
