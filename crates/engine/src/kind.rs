//! Which engine a worker runs, and where what engines are asked differs between them. A further
//! engine is a variant of [`EngineKind`] and a folder beside `vllm` and `sglang`.

use crate::identity::{self, EngineModel, EngineVersion, EventSource, SourcesError};
use crate::load::EngineLoad;
use crate::{sglang, vllm};

/// The engine that a worker runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

/// The paths of the reports that an engine makes without computation.
#[derive(Clone, Copy, Debug)]
pub struct ReportPaths {
    /// Answers 200 at once if the engine is alive.
    pub liveness: &'static str,
    /// Read by [`EngineKind::version`].
    pub version: &'static str,
    /// Read by [`EngineKind::served_models`].
    pub models: &'static str,
    /// Read by [`EngineKind::event_sources`]; some versions do not have this path.
    pub event_sources: &'static str,
    /// Read by [`EngineKind::load`].
    pub metrics: &'static str,
}

impl EngineKind {
    /// The engine's name in reports and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }

    /// The engine with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        [Self::Vllm, Self::Sglang].into_iter().find(|engine| engine.name() == name)
    }

    /// The paths of the engine's reports.
    #[must_use]
    pub const fn paths(self) -> ReportPaths {
        match self {
            Self::Vllm => vllm::PATHS,
            Self::Sglang => sglang::PATHS,
        }
    }

    /// The engine's version in the engine's notation; `None` if the text does not have it.
    #[must_use]
    pub fn version(self, text: &str) -> Option<String> {
        match self {
            Self::Vllm | Self::Sglang => identity::version(text),
        }
    }

    /// The oldest version whose KV events, usage and hand-offs are known; `None` if there is no such
    /// limit.
    #[must_use]
    pub const fn oldest_version(self) -> Option<EngineVersion> {
        match self {
            Self::Vllm => Some(vllm::OLDEST_VERSION),
            Self::Sglang => None,
        }
    }

    /// All models and adapters that the engine lists, at most 4096. `None` if the text is not a list
    /// of models.
    #[must_use]
    pub fn served_models(self, text: &str) -> Option<Vec<EngineModel>> {
        match self {
            Self::Vllm | Self::Sglang => identity::served_models(text),
        }
    }

    /// The model that the engine serves: the first one that is not an adapter. `None` if the text is
    /// not a list of models, or the list is empty.
    #[must_use]
    pub fn served_model(self, text: &str) -> Option<EngineModel> {
        self.served_models(text)?.into_iter().find(|model| !model.is_adapter)
    }

    /// The sources that an engine on `host` lists, by rank; empty if it publishes no events. An
    /// engine reports the address to which it is bound, usually `*`, which is replaced by `host`.
    ///
    /// # Errors
    /// The text is invalid, or a source cannot be reached over TCP.
    pub fn event_sources(self, text: &str, host: &str) -> Result<Vec<EventSource>, SourcesError> {
        match self {
            Self::Vllm => vllm::event_sources(text, host),
            Self::Sglang => sglang::event_sources(text, host),
        }
    }

    /// The load in the engine's metrics. The text may have any length and be invalid UTF-8.
    #[must_use]
    pub fn load(self, metrics: &[u8]) -> EngineLoad {
        match self {
            Self::Vllm => vllm::load(metrics),
            Self::Sglang => sglang::load(metrics),
        }
    }

    /// Whether Messages and embeddings separate cached blocks by `cache_salt`, as the endpoints of
    /// OpenAI's other APIs do.
    #[must_use]
    pub const fn salts_all_endpoints(self) -> bool {
        match self {
            Self::Vllm => true,
            Self::Sglang => false,
        }
    }

    /// Whether the engine has `/inference/v1/generate`: token ids in, token ids out.
    #[must_use]
    pub const fn generates_from_ids(self) -> bool {
        match self {
            Self::Vllm => true,
            Self::Sglang => false,
        }
    }

    /// Whether the router may ask the engine for the tokens of each prompt (`tokenizer: engine`).
    #[must_use]
    pub const fn tokenizes_prompts(self) -> bool {
        match self {
            Self::Vllm => true,
            Self::Sglang => false,
        }
    }
}
