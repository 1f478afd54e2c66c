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
    /// The addresses of a DNS name, each a worker.
    Dns(DnsDiscovery),
    /// Pods of a Kubernetes cluster, each a worker.
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
                let pods = match (&pods.inference_pool, &pods.selector, &pods.port) {
                    (None, Some(selector), Some(port)) => format!("{selector}:{port}"),
                    (pool, ..) => format!("InferencePool/{}", pool.as_deref().unwrap_or_default()),
                };
                format!("kubernetes:{cluster}{namespace}/{pods}")
            }
        }
    }
}

/// The addresses of a DNS name, each a worker.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DnsDiscovery {
    /// The DNS name, such as that of a headless Service.
    #[schemars(length(min = 1, max = 254))]
    pub name: String,
    /// The port of the engines' HTTP servers.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// The scheme of the engines' URLs. `https` usually needs `engine_tls.server_name`.
    #[serde(default)]
    pub scheme: UrlScheme,
    /// The role of all workers.
    pub role: Role,
    /// The addresses that are used. An engine with both is one worker.
    #[serde(default)]
    pub family: AddressFamily,
    /// The port of KV events. Default: engines are asked.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub kv_events_port: Option<u16>,
    /// The port of replays of KV events.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub kv_replay_port: Option<u16>,
    /// The bootstrap port of prefill workers, for `mooncake` and `sglang`. Default: 8998.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65_535))]
    pub bootstrap_port: Option<u16>,
    /// Whether the addresses are those of shims.
    #[serde(default)]
    pub shim: bool,
    /// Whether engines support `cache_hit_threshold`. Default: each is asked once.
    #[serde(default)]
    pub supports_cache_hit_threshold: Option<bool>,
    /// Interval between lookups; up to a tenth is added at random.
    #[serde(default = "refresh_interval")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1s"))]
    pub refresh_interval: Duration,
    /// How long the last addresses are kept after DNS has said that there are none. While DNS does
    /// not answer, they are kept.
    #[serde(default = "empty_grace")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub empty_grace: Duration,
}

fn refresh_interval() -> Duration {
    Duration::from_secs(10)
}

fn empty_grace() -> Duration {
    Duration::from_secs(300)
}

/// The scheme of the URLs of workers that a source finds.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum UrlScheme {
    /// HTTP without TLS.
    #[default]
    Http,
    /// HTTP over TLS.
    Https,
}

impl UrlScheme {
    /// The scheme as URLs spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// The addresses of a name that are used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AddressFamily {
    /// IPv4 addresses, or IPv6 ones if there are no others.
    #[default]
    Auto,
    /// The IPv4 addresses.
    Ipv4,
    /// The IPv6 addresses.
    Ipv6,
}

/// Pods of a Kubernetes cluster, each a worker.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KubernetesDiscovery {
    /// The namespace of the pods. Default: that of the router, or of the kubeconfig's context.
    #[serde(default)]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9-]+$"))]
    pub namespace: Option<String>,
    /// A label selector: `app=vllm,model in (a, b)`. Required without `inference_pool`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 1024))]
    pub selector: Option<String>,
    /// The name of an InferencePool (`inference.networking.k8s.io/v1`), which has the labels of the
    /// pods and their ports. If it has several ports, each is a worker.
    #[serde(default)]
    #[schemars(length(min = 1, max = 253))]
    pub inference_pool: Option<String>,
    /// The role of all pods. Default: by `role_label`.
    #[serde(default)]
    pub role: Option<Role>,
    /// The label with a pod's role (`prefill`, `decode`, `both`). Default: `splitrail.io/role`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 317))]
    pub role_label: Option<String>,
    /// The label with a pod's transfer group (`workers[].transfer_group`), such as the revision of what
    /// all prefill and decode pods are made from. Default: `disaggregatedset.x-k8s.io/revision`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 317))]
    pub transfer_group_label: Option<String>,
    /// The engines' HTTP port: a number, or a container port's name. Required without
    /// `inference_pool`.
    #[serde(default)]
    pub port: Option<PodPort>,
    /// The scheme of the engines' URLs. `https` usually needs `engine_tls.server_name`.
    #[serde(default)]
    pub scheme: UrlScheme,
    /// The port of KV events. The annotation `splitrail.io/kv-events-port` takes precedence.
    /// Default: engines are asked. The worker of an InferencePool's second port has the next port,
    /// and so on.
    #[serde(default)]
    pub kv_events_port: Option<PodPort>,
    /// The port of replays of KV events, for each worker as `kv_events_port`. The annotation
    /// `splitrail.io/kv-replay-port` takes precedence.
    #[serde(default)]
    pub kv_replay_port: Option<PodPort>,
    /// The bootstrap port of prefill workers, for `mooncake` and `sglang`. The annotation
    /// `splitrail.io/bootstrap-port` takes precedence. Default: 8998.
    #[serde(default)]
    pub bootstrap_port: Option<PodPort>,
    /// Whether `port` is that of a shim.
    #[serde(default)]
    pub shim: bool,
    /// Whether engines support `cache_hit_threshold`. Default: each is asked once.
    #[serde(default)]
    pub supports_cache_hit_threshold: Option<bool>,
    /// A kubeconfig file. Default: the service account of the router's pod.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// Its context. Default: the current one.
    #[serde(default)]
    pub context: Option<String>,
}

impl KubernetesDiscovery {
    /// The label that says a pod's role where `role_label` is left out.
    pub const ROLE_LABEL: &str = "splitrail.io/role";
    /// The label that says a pod's transfer group where `transfer_group_label` is left out: that of a
    /// DisaggregatedSet (kubernetes-sigs/lws), which has one revision for all roles. The revisions of
    /// two LeaderWorkerSets, one for each role, differ always.
    pub const TRANSFER_GROUP_LABEL: &str = "disaggregatedset.x-k8s.io/revision";
}
