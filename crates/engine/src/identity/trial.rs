//! Small requests whose replies show what an engine supports.

use serde_json::json;

use super::Reply;

/// A request of a few tokens that asks for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// Requires that the whole prompt is cached, which is impossible, because the last token of a
    /// prompt is always computed. An engine that supports the field refuses the request; an engine
    /// that does not know it generates a token.
    Threshold,
    /// Has no special field; only the reply's usage matters.
    Usage,
    /// Requests a rank that does not exist. An engine that knows the header refuses it.
    Rank,
}

/// What a trial found out; `None` for what it did not test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialOutcome {
    /// Whether the engine supports `cache_hit_threshold`.
    pub supports_cache_hit_threshold: Option<bool>,
    /// Whether its usage reports `cached_tokens`.
    pub reports_cached_tokens: Option<bool>,
    /// Whether a request can be pinned to a rank.
    pub takes_rank_header: Option<bool>,
}

impl Trial {
    /// The JSON body of the request.
    #[must_use]
    pub fn body(self, model: &str) -> String {
        self.body_of(model, "splitrail")
    }

    /// The JSON body of the request with a given prompt.
    #[must_use]
    pub fn body_of(self, model: &str, prompt: &str) -> String {
        let mut body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
        if self == Self::Threshold {
            body["cache_hit_threshold"] = 1.0.into();
        }
        body.to_string()
    }

    /// The rank for the header, for an engine with `ranks` ranks.
    #[must_use]
    pub fn rank(self, ranks: u32) -> Option<u32> {
        (self == Self::Rank).then_some(ranks)
    }

    /// Interprets a reply. `None` if the reply shows nothing, so that the trial must be
    /// repeated: the engine may be overloaded, or about to stop.
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
                    Self::Threshold => outcome.supports_cache_hit_threshold = Some(turned_away),
                    Self::Rank => outcome.takes_rank_header = Some(false),
                    Self::Usage => {}
                }
            }
            (Self::Threshold, 412) => outcome.supports_cache_hit_threshold = Some(true),
            // vLLM: `data_parallel_rank 1 is out of range [0, 1).`
            (Self::Rank, 400 | 422) if body.windows(4).any(|word| word == b"rank") => {
                outcome.takes_rank_header = Some(true);
            }
            // If the engine does not serve completions in this form, nothing can be concluded.
            (Self::Threshold, 400 | 404 | 405 | 422) => {
                outcome.supports_cache_hit_threshold = Some(false)
            }
            (_, 400 | 404 | 405 | 422) => {}
            _ => return None,
        }
        Some(outcome)
    }
}
