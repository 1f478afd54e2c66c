//! The worker that `splitrail check --connect` inspects: its configuration, its address and its origin.

use std::fmt;

use http::uri::Authority;
use splitrail_config::model::WorkerConfig;
use splitrail_engine_client::Engine;
use splitrail_engine_client::echoes::Echoes;

/// Where a worker is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The worker is listed in the configuration.
    Listed,
    /// A source found it; the source's name.
    Found(String),
}

/// A worker that is to be inspected.
#[derive(Clone, Debug)]
pub struct SubjectWorker {
    /// The worker's configuration, or what its source says.
    pub config: WorkerConfig,
    /// Where it is from.
    pub origin: Origin,
}

/// A worker with its address.
pub(crate) struct Subject {
    pub(crate) worker: SubjectWorker,
    authority: Authority,
    echoes: Echoes,
}

impl Subject {
    /// `None` if the URL has no address, which the rules of the configuration exclude.
    pub(crate) fn new(worker: SubjectWorker) -> Option<Self> {
        let url: http::Uri = worker.config.url.parse().ok()?;
        let authority = url.authority()?.clone();
        Some(Self { worker, authority, echoes: Echoes::default() })
    }

    /// The worker's host; an IPv6 address has brackets.
    pub(crate) fn host(&self) -> &str {
        self.authority.host()
    }
}

impl Engine for Subject {
    fn id(&self) -> &str {
        &self.worker.config.id
    }

    fn model(&self) -> &str {
        ""
    }

    fn authority(&self) -> &Authority {
        &self.authority
    }

    fn process(&self) -> u64 {
        0
    }

    fn uses_tls(&self) -> bool {
        self.worker.config.url.starts_with("https://")
    }

    fn is_guarded(&self) -> bool {
        self.worker.origin != Origin::Listed
    }

    fn has_shim(&self) -> bool {
        self.worker.config.shim
    }

    fn echoes(&self) -> &Echoes {
        &self.echoes
    }

    fn set_unreachable(&self, _: fmt::Arguments<'_>) {}

    fn count_resent(&self) {}

    fn count_foreign_reply(&self) {}

    fn count_unsolicited(&self) {}
}
