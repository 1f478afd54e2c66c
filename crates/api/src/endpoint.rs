//! The endpoints whose requests are sent to engines.

use splitrail_engine::dialect::Dialect;

/// An endpoint whose requests are sent to engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/inference/v1/generate`: token ids in, token ids out. Its sampling parameters are in a
    /// nested object.
    Generate,
    /// `/v1/responses`: OpenAI's Responses API.
    Responses,
    /// `/v1/messages`: Anthropic's Messages API.
    Messages,
    /// `/v1/embeddings`: returns vectors, not text.
    Embeddings,
    /// `/v1/score`: how well texts fit other texts.
    ScoreV1,
    /// `/score`, the same.
    Score,
    /// `/v1/rerank`: documents in the order of their relevance to a query.
    RerankV1,
    /// `/v2/rerank`, the same.
    RerankV2,
    /// `/rerank`, the same.
    Rerank,
    /// `/classify`: the probabilities of a model's classes.
    Classify,
    /// `/pooling`: the output of a model's pooler, whatever it is.
    Pooling,
    /// `/tokenize`: a text or a chat in, token ids out.
    Tokenize,
    /// `/detokenize`: token ids in, text out.
    Detokenize,
    /// `/v1/messages/count_tokens`: a `/v1/messages` body in, the length of its prompt out.
    CountTokens,
    /// `/v1/audio/transcriptions`: a form with a recording in, its text out.
    Transcriptions,
    /// `/v1/audio/translations`: the same, in English.
    Translations,
}

impl Endpoint {
    /// All endpoints.
    pub const ALL: [Self; 18] = [
        Self::Chat,
        Self::Completions,
        Self::Generate,
        Self::Responses,
        Self::Messages,
        Self::Embeddings,
        Self::ScoreV1,
        Self::Score,
        Self::RerankV1,
        Self::RerankV2,
        Self::Rerank,
        Self::Classify,
        Self::Pooling,
        Self::Tokenize,
        Self::Detokenize,
        Self::CountTokens,
        Self::Transcriptions,
        Self::Translations,
    ];

    /// The endpoint at a path.
    pub fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }

    /// The path, which is the same at router and engine. Never built from a client's bytes.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/inference/v1/generate",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Embeddings => "/v1/embeddings",
            Self::ScoreV1 => "/v1/score",
            Self::Score => "/score",
            Self::RerankV1 => "/v1/rerank",
            Self::RerankV2 => "/v2/rerank",
            Self::Rerank => "/rerank",
            Self::Classify => "/classify",
            Self::Pooling => "/pooling",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Transcriptions => "/v1/audio/transcriptions",
            Self::Translations => "/v1/audio/translations",
        }
    }

    /// Whether the endpoint generates tokens in the flows of the model. One worker serves auxiliary
    /// endpoints, which generate none, or the text of a recording.
    pub fn generates(self) -> bool {
        use Endpoint::{Chat, Completions, Generate, Messages, Responses};
        matches!(self, Chat | Completions | Generate | Responses | Messages)
    }

    /// Whether the body is a form with a recording, and the reply has its text, streamed or not.
    pub fn transcribes(self) -> bool {
        matches!(self, Self::Transcriptions | Self::Translations)
    }

    /// Whether the model computes the prompt, so that the reply has usage.
    pub fn computes(self) -> bool {
        !matches!(self, Self::Tokenize | Self::Detokenize | Self::CountTokens)
    }

    /// Whether requests must name their model. At other endpoints it may be left out if the router
    /// serves one model only.
    pub fn names_model(self) -> bool {
        !matches!(self, Self::Tokenize | Self::Detokenize)
    }

    /// The members of the body that contain the prompt.
    pub fn prompt_members(self) -> &'static [&'static str] {
        match self {
            Self::Chat => &["messages"],
            Self::Completions => &["prompt"],
            Self::Generate => &["token_ids"],
            Self::Responses => &["instructions", "input", "tools"],
            Self::Messages | Self::CountTokens => &["system", "messages", "tools"],
            // vLLM accepts messages as well.
            Self::Embeddings | Self::Classify => &["input", "messages"],
            Self::ScoreV1 | Self::Score => {
                &["text_1", "text_2", "data_1", "data_2", "query", "queries", "documents", "items"]
            }
            Self::RerankV1 | Self::RerankV2 | Self::Rerank => &["query", "documents"],
            Self::Pooling => &["input", "messages", "data"],
            Self::Tokenize => &["prompt", "messages"],
            Self::Detokenize => &["tokens"],
            // The recording is no member.
            Self::Transcriptions | Self::Translations => &[],
        }
    }

    /// The value of the label `endpoint` in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Embeddings => "embeddings",
            Self::ScoreV1 | Self::Score => "score",
            Self::RerankV1 | Self::RerankV2 | Self::Rerank => "rerank",
            Self::Classify => "classify",
            Self::Pooling => "pooling",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::CountTokens => "count_tokens",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
        }
    }

    /// The dialect of the endpoint's replies.
    pub fn dialect(self) -> Dialect {
        match self {
            Self::Responses => Dialect::Responses,
            Self::Messages | Self::CountTokens => Dialect::Messages,
            _ => Dialect::Chunks,
        }
    }
}
