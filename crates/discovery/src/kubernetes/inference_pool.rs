//! InferencePool v1 of the Gateway API inference extension: a resource that names pods by their
//! labels, and up to eight HTTP ports of each.
//!
//! Several ports are the data-parallel ranks of one pod, each with an HTTP server of its own
//! (docs/proposals/1374-multi-endpoint of gateway-api-inference-extension).

use std::collections::BTreeMap;

use kube::core::{ApiResource, GroupVersionKind, NotUsed, Object};
use kube::runtime::watcher::Event;
use serde::Deserialize;
use splitrail_config::PodPort;

/// An InferencePool. Its status is the gateways'.
pub(super) type InferencePool = Object<PoolSpec, NotUsed>;

/// Maximum number of ports, which is that of the resource's schema.
const TARGET_PORTS_MAX: usize = 8;
/// The application protocol of engines that speak HTTP/2 without TLS.
const HTTP_2: &str = "kubernetes.io/h2c";

/// What a pool says of its pods.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PoolSpec {
    selector: PoolSelector,
    target_ports: Vec<TargetPort>,
    app_protocol: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PoolSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
struct TargetPort {
    number: u16,
}

/// Which pods are workers, and at which ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// A label selector.
    pub(super) selector: String,
    /// The HTTP ports of each pod, each of which is a worker.
    pub(super) ports: Vec<PodPort>,
}

/// How the API server names the resource.
pub(super) fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool");
    ApiResource::from_gvk_with_plural(&kind, "inferencepools")
}

/// The only pool that is watched.
#[derive(Debug, Default)]
pub(super) struct WatchedPool {
    listed: Option<InferencePool>,
}

impl WatchedPool {
    /// Takes an event. Returns what is known now: the pool, or that there is none.
    pub(super) fn take(&mut self, event: Event<InferencePool>) -> Option<Option<InferencePool>> {
        match event {
            Event::Init => {
                self.listed = None;
                None
            }
            Event::InitApply(pool) => {
                self.listed = Some(pool);
                None
            }
            Event::InitDone => Some(self.listed.take()),
            Event::Apply(pool) => Some(Some(pool)),
            Event::Delete(_) => Some(None),
        }
    }
}

/// The pods and ports of a pool, or why the router cannot use them.
pub(super) fn selection(pool: &PoolSpec) -> Result<Selection, &'static str> {
    if pool.app_protocol.as_deref() == Some(HTTP_2) {
        return Err("its appProtocol is HTTP/2, and the router speaks HTTP/1.1 with engines");
    }
    let labels = &pool.selector.match_labels;
    if labels.is_empty() || pool.target_ports.is_empty() {
        return Err("it has no labels or no ports");
    }
    let labels: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let ports = pool.target_ports.iter().take(TARGET_PORTS_MAX);
    let ports = ports.map(|port| PodPort::Number(port.number)).collect();
    Ok(Selection { selector: labels.join(","), ports })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pool(change: Value) -> InferencePool {
        let mut spec = json!({
            "selector": { "matchLabels": { "app": "vllm", "a.b/c": "" } },
            "targetPorts": [{ "number": 8000 }, { "number": 8001 }],
            "appProtocol": "http",
            "endpointPickerRef": { "name": "picker", "port": { "number": 9002 } },
        });
        spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        serde_json::from_value(json!({
            "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": { "name": "pool" }, "spec": spec, "status": { "parents": [] },
        }))
        .unwrap()
    }

    #[test]
    fn a_pool_names_pods_by_labels_and_their_ports() {
        let found = selection(&pool(json!({})).spec).unwrap();
        assert_eq!(found.selector, "a.b/c=,app=vllm");
        assert_eq!(found.ports, [PodPort::Number(8000), PodPort::Number(8001)]);
        let http_2 = selection(&pool(json!({ "appProtocol": HTTP_2 })).spec).unwrap_err();
        assert!(http_2.contains("HTTP/2"), "{http_2}");
        for empty in [json!({ "targetPorts": [] }), json!({ "selector": { "matchLabels": {} } })] {
            assert!(selection(&pool(empty).spec).is_err());
        }
    }

    #[test]
    fn a_pool_that_a_list_lacks_is_gone() {
        let mut watched = WatchedPool::default();
        let mut known = |event| watched.take(event).map(|pool| pool.is_some());
        assert_eq!(known(Event::Init), None);
        assert_eq!(known(Event::InitApply(pool(json!({})))), None);
        assert_eq!(known(Event::InitDone), Some(true));
        assert_eq!(known(Event::Delete(pool(json!({})))), Some(false));
        assert_eq!(known(Event::Apply(pool(json!({})))), Some(true));
        assert_eq!(known(Event::Init), None);
        assert_eq!(known(Event::InitDone), Some(false));
    }
}
