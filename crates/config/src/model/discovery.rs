//! Sources of workers that are not in the file.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod port;

pub use port::PodPort;

use super::Role;
use crate::scalar;

/// A source of workers.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Discovery {
    /// Shims that attach to this router.
    Shim {},
    /// The addresses of a DNS name, each an engine.
    Dns(DnsDiscovery),
    /// Pods of a Kubernetes cluster, each an engine.
    Kubernetes(KubernetesDiscovery),
}

impl Discovery {
    /// The source's name in logs and in the metrics' label `source`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Shim {} => "shim".to_owned(),
            Self::Dns(dns) => format!("dns:{}:{}", dns.name, dns.port),
            Self::Kubernetes(pods) => {
                let cluster = pods.context.as_ref().map(|name| format!("{name}@"));
                let cluster = cluster.unwrap_or_default();
                let namespace = pods.namespace.as_deref().unwrap_or_default();
                format!("kubernetes:{cluster}{namespace}/{}:{}", pods.selector, pods.port)
            }
        }
    }
}

/// The addresses of a DNS name, each an engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DnsDiscovery {
    /// The name: that of a headless Service, say, which has one address for each pod.
    #[schemars(length(min = 1, max = 254))]
    pub name: String,
    /// The port of the engines' HTTP servers.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// What the engines behind the name do.
    pub role: Role,
    /// Which addresses count. An engine with two addresses is one worker.
    #[serde(default)]
    pub family: AddressFamily,
    /// The port on which they publish KV events.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub kv_events_port: Option<u16>,
    /// The port on which they answer replay requests.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub kv_replay_port: Option<u16>,
    /// The port of prefill workers' bootstrap servers, for `connector: mooncake` and `sglang`;
    /// left out, 8998.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub bootstrap_port: Option<u16>,
    /// Whether the addresses are shims', which gate by `x-splitrail-gate`.
    #[serde(default)]
    pub shim: bool,
    /// Whether the engines honour `cache_hit_threshold`; left out, each is asked once.
    #[serde(default)]
    pub honours_threshold: Option<bool>,
    /// Between two lookups, at least `1s`; up to a tenth of it is added by chance.
    #[serde(default = "refresh")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub refresh: Duration,
    /// How long the last addresses are kept once DNS says that the name has none. While DNS
    /// does not answer they are kept without end.
    #[serde(default = "keep")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub keep: Duration,
}

fn refresh() -> Duration {
    Duration::from_secs(10)
}

fn keep() -> Duration {
    Duration::from_secs(300)
}

/// Which of a name's addresses count.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AddressFamily {
    /// The IPv4 ones; where there are none, the IPv6 ones.
    #[default]
    Auto,
    /// The IPv4 ones.
    Ipv4,
    /// The IPv6 ones.
    Ipv6,
}

/// Pods of a Kubernetes cluster, each an engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KubernetesDiscovery {
    /// Their namespace; left out, the router's own, or that of the kubeconfig's context.
    #[serde(default)]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9-]+$"))]
    pub namespace: Option<String>,
    /// Their labels, in Kubernetes' own form: `app=vllm,model in (a, b)`.
    #[schemars(length(min = 1, max = 1024))]
    pub selector: String,
    /// What they all do; left out, each pod's label says it.
    #[serde(default)]
    pub role: Option<Role>,
    /// The label that says what a pod does: `prefill`, `decode` or `both`. Left out,
    /// `splitrail.io/role`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 317))]
    pub role_label: Option<String>,
    /// The port of the engines' HTTP servers: a number, or the name of a container's port.
    pub port: PodPort,
    /// The port on which they publish KV events. A pod's annotation
    /// `splitrail.io/kv-events-port` comes first.
    #[serde(default)]
    pub kv_events_port: Option<PodPort>,
    /// The port on which they answer replay requests. A pod's annotation
    /// `splitrail.io/kv-replay-port` comes first.
    #[serde(default)]
    pub kv_replay_port: Option<PodPort>,
    /// The port of prefill workers' bootstrap servers, for `connector: mooncake` and `sglang`;
    /// left out, 8998. A pod's annotation `splitrail.io/bootstrap-port` comes first.
    #[serde(default)]
    pub bootstrap_port: Option<PodPort>,
    /// Whether `port` is a shim's, which gates by `x-splitrail-gate`.
    #[serde(default)]
    pub shim: bool,
    /// Whether the engines honour `cache_hit_threshold`; left out, each is asked once.
    #[serde(default)]
    pub honours_threshold: Option<bool>,
    /// A kubeconfig file, for a router outside the cluster; left out, the router's service
    /// account.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context; left out, its current one.
    #[serde(default)]
    pub context: Option<String>,
}

impl KubernetesDiscovery {
    /// The label that says a pod's role where `role_label` is left out.
    pub const ROLE_LABEL: &str = "splitrail.io/role";
}
