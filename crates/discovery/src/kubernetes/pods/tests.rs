//! Pods as workers: which pods count, with which ids, roles and ports, after any order of changes.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const PODS: &str = include_str!("../../../tests/fixtures/kubernetes/pods.json");

fn config(change: Value) -> KubernetesDiscovery {
    let mut config = json!({ "namespace": "llm", "selector": "app=vllm", "port": "http" });
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    serde_json::from_value(config).unwrap()
}

/// The only worker of a pod with one port.
fn worker(config: &KubernetesDiscovery, pod: &Pod) -> Result<WorkerConfig, UnfitReason> {
    let ports = [config.port.clone().unwrap()];
    workers(config, &ports, pod).map(|mut workers| workers.remove(0))
}

/// A pod of the list, with the values at these paths replaced.
fn pod(index: usize, changes: &[(&str, Value)]) -> Pod {
    let mut pods: Value = serde_json::from_str(PODS).unwrap();
    let mut pod = pods["items"][index].take();
    for (place, value) in changes {
        *pod.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value.clone();
    }
    serde_json::from_value(pod).unwrap()
}

const ROLE: &str = "/metadata/labels/splitrail.io~1role";
const EVENTS: &str = "/metadata/annotations/splitrail.io~1kv-events-port";
/// The readiness condition of the first and of the second pod.
const READY: [&str; 2] = ["/status/conditions/2/status", "/status/conditions/0/status"];

#[test]
fn a_ready_pod_is_a_worker_under_its_name() {
    let found =
        worker(&config(json!({ "supports_cache_hit_threshold": false })), &pod(0, &[])).unwrap();
    let expected: WorkerConfig = serde_json::from_value(json!({
        "id": "prefill-0", "role": "prefill", "url": "http://10.42.0.17:8000",
        "kv_events": "tcp://10.42.0.17:5557", "kv_replay": "tcp://10.42.0.17:5558",
        "supports_cache_hit_threshold": false, "location": "/node-a",
    }))
    .unwrap();
    assert_eq!(found, expected);
    let found = worker(&config(json!({})), &pod(1, &[])).unwrap();
    assert_eq!((found.role, found.kv_events), (Role::Decode, None));
    let found = worker(&config(json!({ "scheme": "https" })), &pod(0, &[])).unwrap();
    assert_eq!(found.url, "https://10.42.0.17:8000");
}

#[test]
fn labels_and_the_node_say_group_and_place() {
    let labels = |labels: Value| pod(1, &[("/metadata/labels", labels)]);
    let with = |group: Value| {
        let mut all = json!({ "splitrail.io/role": "decode" });
        all.as_object_mut().unwrap().extend(group.as_object().unwrap().clone());
        labels(all)
    };
    let group =
        |config: Value, pod: &Pod| worker(&self::config(config), pod).unwrap().transfer_group;
    let revision = with(json!({ "disaggregatedset.x-k8s.io/revision": "7f", "pool": "" }));
    assert_eq!(group(json!({}), &revision).as_deref(), Some("7f"));
    assert_eq!(group(json!({ "transfer_group_label": "pool" }), &revision), None, "it is empty");
    assert_eq!(group(json!({}), &labels(json!({ "splitrail.io/role": "decode" }))), None);
    // The revisions of two LeaderWorkerSets, one for each role, differ always.
    let of_one = with(json!({ "leaderworkerset.sigs.k8s.io/template-revision-hash": "a" }));
    assert_eq!(group(json!({}), &of_one), None);
    let mut placed = with(json!({ "topology.kubernetes.io/zone": "eu-1a" }));
    let place = |pod: &Pod| worker(&config(json!({})), pod).unwrap().location;
    placed.spec.as_mut().unwrap().node_name = Some("node-7".to_owned());
    assert_eq!(place(&placed).as_deref(), Some("eu-1a/node-7"));
    placed.spec.as_mut().unwrap().node_name = None;
    assert_eq!(place(&placed).as_deref(), Some("eu-1a/"));
}

#[test]
fn ports_are_numbers_or_names_of_any_container_and_annotations_come_first() {
    // A shim may be an init container.
    let behind = config(json!({ "port": "shim", "shim": true }));
    let found = worker(&behind, &pod(0, &[])).unwrap();
    assert_eq!((found.url.as_str(), found.shim), ("http://10.42.0.17:8001", true));
    let both = config(json!({ "kv_events_port": "http", "kv_replay_port": 6000 }));
    let found = worker(&both, &pod(1, &[])).unwrap();
    assert_eq!(found.kv_events.as_deref(), Some("tcp://10.42.1.9:8000"));
    assert_eq!(found.kv_replay.as_deref(), Some("tcp://10.42.1.9:6000"));
    let found = worker(&both, &pod(0, &[])).unwrap();
    assert_eq!(found.kv_events.as_deref(), Some("tcp://10.42.0.17:5557"));
    assert_eq!(found.kv_replay.as_deref(), Some("tcp://10.42.0.17:5558"));
    let bootstrap = config(json!({ "bootstrap_port": 8998 }));
    let bootstrap_of = |index| worker(&bootstrap, &pod(index, &[])).unwrap().bootstrap;
    assert_eq!(bootstrap_of(0).as_deref(), Some("http://10.42.0.17:8998"));
    assert_eq!(bootstrap_of(1), None);
}

#[test]
fn only_the_beginning_of_an_invalid_annotation_is_kept_and_logged() {
    let annotated = pod(0, &[(EVENTS, json!("x".repeat(256 << 10)))]);
    let unfit = worker(&config(json!({})), &annotated).unwrap_err();
    assert_eq!(unfit, UnfitReason::NoPort("x".repeat(32)));
}

#[test]
fn a_pod_is_no_worker_before_it_is_ready_nor_once_it_goes() {
    let plain = config(json!({}));
    let unfit = |place, value| worker(&plain, &pod(0, &[(place, value)])).unwrap_err();
    assert_eq!(unfit(READY[0], json!("False")), UnfitReason::NotReady);
    assert_eq!(unfit(READY[0], json!("Unknown")), UnfitReason::NotReady);
    assert_eq!(unfit("/status", json!({ "phase": "Pending" })), UnfitReason::NoAddress);
    assert_eq!(unfit("/status/podIP", json!("")), UnfitReason::NoAddress);
    assert_eq!(unfit(ROLE, json!("Prefill")), UnfitReason::UnknownRole);
    assert_eq!(unfit("/metadata/labels", json!({ "app": "vllm" })), UnfitReason::NoRole);
    assert_eq!(unfit("/spec/containers", json!([])), UnfitReason::NoPort("http".to_owned()));
    for port in ["0", "65536", "", "KV", "tcp://x:1"] {
        assert_eq!(unfit(EVENTS, json!(port)), UnfitReason::NoPort(port.to_owned()));
    }
    let mut leaving = pod(0, &[]);
    let metadata = json!({ "name": "prefill-0", "deletionTimestamp": "2026-10-01T09:00:00Z" });
    leaving.metadata = serde_json::from_value(metadata).unwrap();
    assert_eq!(worker(&plain, &leaving).unwrap_err(), UnfitReason::Leaving);
}

#[test]
fn the_role_is_that_of_the_configuration_or_of_the_label_that_it_names() {
    let fixed = config(json!({ "role": "both" }));
    assert_eq!(worker(&fixed, &pod(0, &[])).unwrap().role, Role::Both);
    let label = config(json!({ "role_label": "app" }));
    assert_eq!(worker(&label, &pod(0, &[])).unwrap_err(), UnfitReason::UnknownRole);
    let app = pod(0, &[("/metadata/labels/app", json!("decode"))]);
    assert_eq!(worker(&label, &app).unwrap().role, Role::Decode);
    let both = pod(0, &[("/metadata/labels/app", json!("prefill-decode"))]);
    assert_eq!(worker(&label, &both).unwrap().role, Role::Both);
}

#[test]
fn a_name_that_is_too_long_for_an_id_is_cut_and_stays_apart_from_others() {
    let id = |uid: &str| {
        let name = ("/metadata/name", json!("n".repeat(253)));
        let pod = pod(0, &[name, ("/metadata/uid", json!(uid))]);
        [None, Some(1), Some(65_535)].map(|port| id(&pod, port))
    };
    let ids = [id("5f0a0c3e-1"), id("5f0a0c3e-2"), id(&"u".repeat(200))].concat();
    assert!(ids.iter().all(|id| id.len() == ID_MAX), "{ids:?}");
    assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), ids.len());
}

#[test]
fn each_port_of_a_pod_is_a_worker_and_its_events_are_as_many_ports_further() {
    let ports = [PodPort::Number(8000), PodPort::Number(8010)];
    let found = workers(&config(json!({})), &ports, &pod(0, &[])).unwrap();
    let told: Vec<_> = found
        .iter()
        .map(|worker| (&*worker.id, &*worker.url, worker.kv_events.as_deref().unwrap()))
        .collect();
    assert_eq!(
        told,
        [
            ("prefill-0-8000", "http://10.42.0.17:8000", "tcp://10.42.0.17:5557"),
            ("prefill-0-8010", "http://10.42.0.17:8010", "tcp://10.42.0.17:5558"),
        ]
    );
    let last = pod(0, &[(EVENTS, json!("65535"))]);
    let unfit = workers(&config(json!({})), &ports, &last).unwrap_err();
    assert_eq!(unfit, UnfitReason::NoPort("65535+1".to_owned()));
}

fn names(found: Option<FoundWorkers>) -> Option<Vec<String>> {
    Some(found?.workers.into_iter().map(|worker| worker.id).collect())
}

fn take(pods: &mut Pods, event: Event<Pod>) -> Option<FoundWorkers> {
    pods.apply(event);
    pods.report()
}

fn cleared(pods: &mut Pods) -> Option<FoundWorkers> {
    pods.clear();
    pods.report()
}

fn listed(pods: &mut Pods, list: Vec<Pod>) -> Option<Vec<String>> {
    assert_eq!(take(pods, Event::Init), None);
    for pod in list {
        assert_eq!(take(pods, Event::InitApply(pod)), None);
    }
    names(take(pods, Event::InitDone))
}

fn nobody() -> Pods {
    let mut pods = Pods::new("s".to_owned(), config(json!({})));
    let ports = vec![PodPort::Name("http".to_owned())];
    pods.set_ports(&Selection { selector: "app=vllm".to_owned(), ports });
    pods
}

fn two() -> Pods {
    let mut pods = nobody();
    let told = listed(&mut pods, vec![pod(0, &[]), pod(1, &[])]);
    assert_eq!(told.unwrap(), ["decode-0", "prefill-0"]);
    pods
}

#[test]
fn a_list_is_reported_as_a_whole_and_missing_pods_have_left() {
    let mut pods = two();
    assert_eq!(listed(&mut pods, vec![pod(1, &[]), pod(0, &[])]), None);
    assert_eq!(listed(&mut pods, vec![pod(1, &[])]).unwrap(), ["decode-0"]);
    assert!(listed(&mut pods, Vec::new()).unwrap().is_empty());
    assert_eq!(listed(&mut pods, Vec::new()), None);
    // A cluster without matching pods is reported once.
    let mut nobody = nobody();
    assert!(listed(&mut nobody, Vec::new()).unwrap().is_empty());
}

#[test]
fn a_list_that_breaks_off_changes_nothing() {
    let mut pods = two();
    assert_eq!(take(&mut pods, Event::Init), None);
    assert_eq!(take(&mut pods, Event::InitApply(pod(1, &[]))), None);
    assert_eq!(listed(&mut pods, vec![pod(0, &[]), pod(1, &[])]), None);
}

#[test]
fn without_a_selection_there_are_no_workers_and_that_is_reported_once() {
    let mut pods = two();
    assert!(names(cleared(&mut pods)).unwrap().is_empty());
    assert_eq!(cleared(&mut pods), None);
    assert_eq!(listed(&mut pods, vec![pod(0, &[])]).unwrap(), ["prefill-0"]);
}

#[test]
fn relevant_changes_of_a_pod_are_reported() {
    let mut pods = two();
    let heartbeat = pod(1, &[("/metadata/resourceVersion", json!("50000"))]);
    assert_eq!(take(&mut pods, Event::Apply(heartbeat)), None);
    let not_ready = pod(1, &[(READY[1], json!("False"))]);
    assert_eq!(names(take(&mut pods, Event::Apply(not_ready))).unwrap(), ["prefill-0"]);
    assert_eq!(
        names(take(&mut pods, Event::Apply(pod(1, &[])))).unwrap(),
        ["decode-0", "prefill-0"]
    );
    let moved =
        take(&mut pods, Event::Apply(pod(1, &[("/status/podIP", json!("10.42.1.77"))]))).unwrap();
    let moved = &moved.workers[0];
    assert_eq!((moved.id.as_str(), moved.url.as_str()), ("decode-0", "http://10.42.1.77:8000"));
    let other = take(&mut pods, Event::Apply(pod(1, &[(ROLE, json!("both"))]))).unwrap();
    assert_eq!(other.workers[0].role, Role::Both);
    assert_eq!(names(take(&mut pods, Event::Delete(pod(1, &[])))).unwrap(), ["prefill-0"]);
}

#[test]
fn a_late_word_of_a_pod_s_end_does_not_take_its_successor() {
    let mut pods = two();
    let successor = pod(1, &[("/metadata/uid", json!("5f0a0c3e-new"))]);
    assert_eq!(take(&mut pods, Event::Apply(successor)), None);
    assert_eq!(take(&mut pods, Event::Delete(pod(1, &[]))), None);
}

proptest! {
    /// The reported workers depend only on the current pods, not on the order of events.
    #[test]
    fn any_order_of_changes_ends_like_a_list(
        steps in prop::collection::vec((0_usize..2, 0_u8..3), 0..30),
    ) {
        let mut followed = two();
        let mut state = [Some(true), Some(true)];
        let mut told = names(Some(FoundWorkers { workers: followed.reported.clone().unwrap() }));
        for (index, step) in steps {
            let ready = json!(if step == 1 { "True" } else { "False" });
            let changed = pod(index, &[(READY[index], ready)]);
            state[index] = [Some(false), Some(true), None][step as usize];
            let event = match state[index] {
                Some(_) => Event::Apply(changed),
                None => Event::Delete(changed),
            };
            told = names(take(&mut followed, event)).or(told);
        }
        let expected: Vec<_> = ["decode-0", "prefill-0"]
            .into_iter()
            .zip([state[1], state[0]])
            .filter(|(_, state)| *state == Some(true))
            .map(|(name, _)| name.to_owned())
            .collect();
        prop_assert_eq!(told.unwrap(), expected);
    }
}
