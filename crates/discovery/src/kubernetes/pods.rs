//! The pods that the API server reported, and the workers that they run.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use kube::runtime::watcher::Event;

use super::inference_pool::Selection;
use crate::{FoundWorkers, WORKERS_MAX, address, bounded};
use splitrail_config::PodPort;
use splitrail_config::model::{KubernetesDiscovery, Role, WorkerConfig};

/// Annotations with which a pod names its ports.
const KV_EVENTS: &str = "splitrail.io/kv-events-port";
const KV_REPLAY: &str = "splitrail.io/kv-replay-port";
const BOOTSTRAP: &str = "splitrail.io/bootstrap-port";

/// Maximum number of characters of a worker's id; a pod's name may have 253.
const ID_MAX: usize = 128;
/// Maximum number of characters of an annotation that are kept and logged; an annotation may have
/// 256 KiB.
const ANNOTATION_MAX: usize = 32;
/// Maximum number of pods, including those that are not ready.
const PODS_MAX: usize = 4 * WORKERS_MAX;

/// All pods that match the selector.
pub(super) struct Pods {
    source: String,
    config: KubernetesDiscovery,
    /// The HTTP ports of each pod, each of which is a worker.
    ports: Vec<PodPort>,
    /// The pods by name, which is unique within a namespace.
    seen: BTreeMap<String, SeenPod>,
    /// A list that is still being received.
    listed: Option<BTreeMap<String, SeenPod>>,
    /// Whether a list has been received as a whole, or nothing selects pods.
    is_complete: bool,
    /// The workers that were last reported.
    reported: Option<Vec<WorkerConfig>>,
}

struct SeenPod {
    uid: Option<String>,
    result: Result<Vec<WorkerConfig>, UnfitReason>,
}

/// Why a pod is not a worker at present.
#[derive(Clone, Debug, PartialEq, Eq)]
enum UnfitReason {
    /// The pod is being deleted and gets no new work.
    Leaving,
    /// The pod has no address yet.
    NoAddress,
    /// The pod's readiness condition is not true.
    NotReady,
    /// Neither the configuration nor a label names a role.
    NoRole,
    /// The role label has an unknown value.
    UnknownRole,
    /// No container has a port of this name, or the annotation has an invalid value, of which this
    /// is the beginning.
    NoPort(String),
}

impl UnfitReason {
    /// Whether this is a configuration error, rather than a state that passes.
    fn is_mistake(&self) -> bool {
        matches!(self, Self::NoRole | Self::UnknownRole | Self::NoPort(_))
    }
}

impl fmt::Display for UnfitReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaving => out.write_str("it is being deleted"),
            Self::NoAddress => out.write_str("it has no address yet"),
            Self::NotReady => out.write_str("it is not ready"),
            Self::NoRole => out.write_str("it has no label with its role"),
            Self::UnknownRole => {
                out.write_str("its role label is none of prefill, decode and both")
            }
            Self::NoPort(port) => write!(out, "it has no port {port:?}"),
        }
    }
}

impl Pods {
    pub(super) fn new(source: String, config: KubernetesDiscovery) -> Self {
        Self {
            source,
            config,
            ports: Vec::new(),
            seen: BTreeMap::new(),
            listed: None,
            is_complete: false,
            reported: None,
        }
    }

    /// Says at which ports pods serve. Takes effect with the next list of pods.
    pub(super) fn set_ports(&mut self, selection: &Selection) {
        self.ports.clone_from(&selection.ports);
    }

    /// Forgets all pods, because nothing selects any.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
        self.listed = None;
        self.is_complete = true;
    }

    /// Takes an event.
    pub(super) fn apply(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(pod) => {
                let mut listed = self.listed.take().unwrap_or_default();
                self.put(&mut listed, &pod);
                self.listed = Some(listed);
            }
            // Pods that are missing from the list left while no watch was open.
            Event::InitDone => {
                self.seen = self.listed.take().unwrap_or_default();
                self.is_complete = true;
            }
            Event::Apply(pod) => {
                let mut seen = std::mem::take(&mut self.seen);
                self.put(&mut seen, &pod);
                self.seen = seen;
            }
            Event::Delete(pod) => {
                let name = pod.name_any();
                // A newer pod of the same name must stay.
                if self.seen.get(&name).is_some_and(|seen| seen.uid == pod.metadata.uid) {
                    self.seen.remove(&name);
                }
            }
        }
    }

    /// All workers if they are to be reported: after the first list, and when they have changed.
    pub(super) fn report(&mut self) -> Option<FoundWorkers> {
        if !self.is_complete {
            return None;
        }
        let fit = self.seen.values().filter_map(|seen| seen.result.as_ref().ok());
        let mut workers: Vec<_> = fit.flatten().cloned().collect();
        workers.sort_by(|left, right| left.id.cmp(&right.id));
        let workers = bounded(&self.source, workers);
        if self.reported.as_ref() == Some(&workers) {
            return None;
        }
        self.reported = Some(workers.clone());
        Some(FoundWorkers { workers })
    }

    fn put(&self, pods: &mut BTreeMap<String, SeenPod>, pod: &Pod) {
        let name = pod.name_any();
        if pods.len() >= PODS_MAX && !pods.contains_key(&name) {
            tracing::error!(source = self.source, pod = name, "too many pods: this one is ignored");
            return;
        }
        let result = workers(&self.config, &self.ports, pod);
        let before = self.seen.get(&name).map(|seen| &seen.result);
        if let Err(unfit) = &result
            && before != Some(&result)
        {
            let source = &self.source;
            if unfit.is_mistake() {
                tracing::warn!(source, pod = name, "a pod is not a worker: {unfit}");
            } else {
                tracing::debug!(source, pod = name, "a pod is not a worker: {unfit}");
            }
        }
        pods.insert(name, SeenPod { uid: pod.metadata.uid.clone(), result });
    }
}

/// The workers that run in a pod, one at each of `ports`, or why there are none.
fn workers(
    config: &KubernetesDiscovery,
    ports: &[PodPort],
    pod: &Pod,
) -> Result<Vec<WorkerConfig>, UnfitReason> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Err(UnfitReason::Leaving);
    }
    let status = pod.status.as_ref();
    let ip = status.and_then(|status| status.pod_ip.as_ref()?.parse::<IpAddr>().ok());
    let ip = ip.ok_or(UnfitReason::NoAddress)?;
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    if !ready.any(|condition| condition.status == "True") {
        return Err(UnfitReason::NotReady);
    }
    let role = role(config, pod)?;
    let ports = ports.iter().map(|port| number(pod, port));
    let ports: Vec<u16> = ports.collect::<Result<_, _>>()?;
    let kv_events = optional(pod, KV_EVENTS, config.kv_events_port.as_ref())?;
    // Without events there is nothing to replay.
    let kv_replay = match kv_events {
        Some(_) => optional(pod, KV_REPLAY, config.kv_replay_port.as_ref())?,
        None => None,
    };
    let bootstrap = match role {
        Role::Decode => None,
        Role::Prefill | Role::Both => optional(pod, BOOTSTRAP, config.bootstrap_port.as_ref())?,
    };
    let at = |scheme, port: Option<u16>| port.map(|port| address(scheme, ip, port));
    let worker = |(rank, port): (u16, u16)| {
        Ok(WorkerConfig {
            id: id(pod, (ports.len() > 1).then_some(port)),
            role,
            url: address(config.scheme.name(), ip, port),
            kv_events: at("tcp", of_rank(kv_events, rank)?),
            kv_replay: at("tcp", of_rank(kv_replay, rank)?),
            bootstrap: at("http", bootstrap),
            shim: config.shim,
            supports_cache_hit_threshold: config.supports_cache_hit_threshold,
            costs: None,
            data_parallel_ranks: None,
            transfer_group: transfer_group(config, pod),
            location: location(pod),
            takes_rank_header: None,
        })
    };
    (0..).zip(ports.iter().copied()).map(worker).collect()
}

/// The port of a rank's KV events or replays, of which rank r publishes r ports further.
fn of_rank(first: Option<u16>, rank: u16) -> Result<Option<u16>, UnfitReason> {
    let Some(first) = first else { return Ok(None) };
    let port = first.checked_add(rank);
    port.map(Some).ok_or_else(|| UnfitReason::NoPort(format!("{first}+{rank}")))
}

/// The pod's name, and the port if the pod has several workers; if that is too long, the
/// beginning of the name with the pod's uid.
fn id(pod: &Pod, port: Option<u16>) -> String {
    let name = pod.name_any();
    let port = port.map(|port| format!("-{port}")).unwrap_or_default();
    if name.len() + port.len() <= ID_MAX {
        return name + &port;
    }
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let room = ID_MAX.saturating_sub(uid.len() + 1 + port.len());
    let start: String = name.chars().take(room).collect();
    let uid: String = uid.chars().take(ID_MAX - 1 - port.len()).collect();
    format!("{start}-{uid}{port}")
}

fn role(config: &KubernetesDiscovery, pod: &Pod) -> Result<Role, UnfitReason> {
    if let Some(role) = config.role {
        return Ok(role);
    }
    let label = config.role_label.as_deref().unwrap_or(KubernetesDiscovery::ROLE_LABEL);
    let said = pod.labels().get(label).ok_or(UnfitReason::NoRole)?;
    let mut roles = [Role::Prefill, Role::Decode, Role::Both].into_iter();
    let role = roles.find(|role| role.name() == said);
    // llm-d's name of the role (docs/architecture.md of llm-d-router).
    let role = role.or_else(|| (said == "prefill-decode").then_some(Role::Both));
    role.ok_or(UnfitReason::UnknownRole)
}

/// The zone and the node of a pod. From Kubernetes 1.35 on, a pod gets the label of its node's zone
/// (KEP-4742: Node Topology Labels via Downward API).
fn location(pod: &Pod) -> Option<String> {
    const ZONE: &str = "topology.kubernetes.io/zone";
    let zone = pod.labels().get(ZONE).map_or("", String::as_str);
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("");
    (!zone.is_empty() || !node.is_empty()).then(|| format!("{zone}/{node}"))
}

/// The pod's transfer group; an empty label is none.
fn transfer_group(config: &KubernetesDiscovery, pod: &Pod) -> Option<String> {
    let label = config.transfer_group_label.as_deref();
    let label = label.unwrap_or(KubernetesDiscovery::TRANSFER_GROUP_LABEL);
    pod.labels().get(label).filter(|group| !group.is_empty()).cloned()
}

/// The port in the pod's annotation, or otherwise in the configuration; `None` if neither has one.
fn optional(
    pod: &Pod,
    annotation: &str,
    configured: Option<&PodPort>,
) -> Result<Option<u16>, UnfitReason> {
    match (pod.annotations().get(annotation), configured) {
        (Some(said), _) => {
            let invalid = || UnfitReason::NoPort(said.chars().take(ANNOTATION_MAX).collect());
            let port = PodPort::parse(said).ok_or_else(invalid)?;
            number(pod, &port).map(Some)
        }
        (None, Some(port)) => number(pod, port).map(Some),
        (None, None) => Ok(None),
    }
}

/// The number of a port; a named port is looked up in the pod's containers.
fn number(pod: &Pod, port: &PodPort) -> Result<u16, UnfitReason> {
    let name = match port {
        PodPort::Number(number) => return Ok(*number),
        PodPort::Name(name) => name,
    };
    let spec = pod.spec.as_ref();
    // A shim may be an init container that keeps running.
    let init = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let main = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let ports = |container: &Container| container.ports.clone().unwrap_or_default();
    let mut ports = main.iter().chain(init).flat_map(ports);
    ports
        .find(|port| port.name.as_ref() == Some(name))
        .and_then(|port| u16::try_from(port.container_port).ok())
        .ok_or_else(|| UnfitReason::NoPort(name.clone()))
}

#[cfg(test)]
mod tests;
