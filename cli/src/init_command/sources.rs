//! Sources of workers that are not listed, as flags give them.

use clap::ValueEnum;

/// Pods of a Kubernetes cluster.
#[derive(Clone, Debug)]
pub(super) struct Pods {
    pub(super) selector: String,
    pub(super) namespace: Option<String>,
    /// A number, or the name of a container's port.
    pub(super) port: String,
    /// The role of all pods; without it, their labels say it.
    pub(super) role: Option<PodsRole>,
}

/// The role of all pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PodsRole {
    Prefill,
    Decode,
    Both,
}

impl PodsRole {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// How shims reach the router.
#[derive(Clone, Debug)]
pub(super) enum Shims {
    /// They attach to its listener, with the token in a file.
    Direct,
    /// Over the servers of a broker.
    Nats(Vec<String>),
}
