//! Merges what the sources report of a worker into one description. Pure functions.

use std::collections::BTreeMap;

use serde::Serialize;

use splitrail_config::model::{Discovery, Model, WorkerConfig};

/// A source that reports workers. Of the sources that report the same worker, the first in this
/// order leads: its values count, and the others fill in values that it lacks. A shim leads only if
/// no operator has given the worker another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerSource {
    /// A shim that is attached.
    Shim,
    /// An operator, on the admin listener.
    Admin,
    /// The configuration file.
    Config,
    /// Kubernetes; the index in the model's `discovery`.
    Kubernetes(usize),
    /// DNS; the index in the model's `discovery`.
    Dns(usize),
}

impl WorkerSource {
    /// The sources in a model's `discovery`, in their order.
    pub fn of(model: &Model) -> impl Iterator<Item = Self> + '_ {
        model.discovery.iter().enumerate().map(|(place, discovery)| match discovery {
            Discovery::Shim {} => Self::Shim,
            Discovery::Dns(_) => Self::Dns(place),
            Discovery::Kubernetes(_) => Self::Kubernetes(place),
        })
    }

    /// The source in a model's later `discovery` that takes the place of this one of `before`: the
    /// same, wherever it is now, otherwise a new one of the same name, or one of the same kind at
    /// the same place whose name is new. `None` if there is none.
    pub(super) fn moved(self, before: &Model, now: &Model) -> Option<Self> {
        let place = Self::of(before).position(|source| source == self)?;
        let own = &before.discovery[place];
        let is_new = |discovery: &Discovery| !before.discovery.contains(discovery);
        let sources = || Self::of(now).zip(&now.discovery);
        let same = sources().find(|(_, discovery)| *discovery == own);
        let renewed =
            || sources().find(|(_, discovery)| discovery.name() == own.name() && is_new(discovery));
        let is_named_anew = |discovery: &Discovery| {
            before.discovery.iter().all(|other| other.name() != discovery.name())
        };
        let at_its_place =
            || sources().find(|(source, discovery)| *source == self && is_named_anew(discovery));
        same.or_else(renewed).or_else(at_its_place).map(|(source, _)| source)
    }

    /// The label in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shim => "shim",
            Self::Admin => "admin",
            Self::Config => "config",
            Self::Kubernetes(_) => "kubernetes",
            Self::Dns(_) => "dns",
        }
    }
}

/// What the sources report of one worker, by source and by the id that each uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(BTreeMap<(WorkerSource, String), WorkerConfig>);

impl Claims {
    /// Records what a source reports, replacing what it reported before.
    pub(super) fn insert(&mut self, source: WorkerSource, config: WorkerConfig) {
        self.0.insert((source, config.id.clone()), config);
    }

    /// Withdraws what a source reported under this id.
    pub(super) fn remove(&mut self, source: WorkerSource, id: &str) {
        self.0.remove(&(source, id.to_owned()));
    }

    /// Gives each report to the source that `place` names in the place of its own; withdraws it if
    /// there is none.
    pub(super) fn moved(self, place: impl Fn(WorkerSource) -> Option<WorkerSource>) -> Self {
        let moved = self.0.into_iter();
        Self(moved.filter_map(|((by, id), config)| Some(((place(by)?, id), config))).collect())
    }

    /// Whether a source reports the worker under this id.
    pub(super) fn has(&self, source: WorkerSource, id: &str) -> bool {
        self.0.contains_key(&(source, id.to_owned()))
    }

    /// The sources that report the worker, the leading one first.
    pub(super) fn sources(&self) -> impl Iterator<Item = WorkerSource> + '_ {
        self.0.keys().map(|(source, _)| *source)
    }

    /// The ids that a source uses for the worker.
    pub(super) fn named_by(&self, source: WorkerSource) -> impl Iterator<Item = &str> {
        self.0.keys().filter(move |(by, _)| *by == source).map(|(_, id)| id.as_str())
    }

    /// What an operator specified: on the admin listener, or otherwise in the configuration.
    pub(super) fn written(&self) -> Option<&WorkerConfig> {
        let by_an_operator =
            |source: WorkerSource| matches!(source, WorkerSource::Admin | WorkerSource::Config);
        self.0.iter().find(|((source, _), _)| by_an_operator(*source)).map(|(_, config)| config)
    }

    /// The merged description of the worker under the given id, with its leading source; `None` if
    /// no source counts. Only sources that give the leading source's address fill in missing
    /// values, since another address may belong to another engine. A shim is ignored if an operator
    /// has given another address.
    pub(super) fn worker(&self, id: &str) -> Option<(WorkerSource, WorkerConfig)> {
        let written = self.written().map(|config| config.url.as_str());
        let counts = |source: WorkerSource, config: &WorkerConfig| {
            source != WorkerSource::Shim || written.is_none_or(|url| url == config.url)
        };
        let mut claims = self.0.iter().filter(|((source, _), config)| counts(*source, config));
        let ((source, _), leading) = claims.next()?;
        let mut worker = WorkerConfig { id: id.to_owned(), ..leading.clone() };
        for (_, other) in claims.filter(|(_, other)| other.url == leading.url) {
            worker.kv_events = worker.kv_events.or_else(|| other.kv_events.clone());
            worker.kv_replay = worker.kv_replay.or_else(|| other.kv_replay.clone());
            worker.bootstrap = worker.bootstrap.or_else(|| other.bootstrap.clone());
            worker.supports_cache_hit_threshold =
                worker.supports_cache_hit_threshold.or(other.supports_cache_hit_threshold);
            worker.data_parallel_ranks = worker.data_parallel_ranks.or(other.data_parallel_ranks);
            worker.transfer_group = worker.transfer_group.or_else(|| other.transfer_group.clone());
            worker.location = worker.location.or_else(|| other.location.clone());
            worker.takes_rank_header = worker.takes_rank_header.or(other.takes_rank_header);
        }
        worker.shim |= *source == WorkerSource::Shim;
        Some((*source, worker))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn worker(id: &str, url: &str, events: Option<&str>) -> WorkerConfig {
        let mut json = serde_json::json!({"id": id, "role": "both", "url": url});
        json["kv_events"] = events.into();
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_shim_leads_and_the_file_fills_gaps() {
        let mut claims = Claims::default();
        claims.insert(WorkerSource::Config, worker("w0", "http://a:1", Some("tcp://a:5557")));
        assert_eq!(claims.worker("w0").unwrap().0, WorkerSource::Config);
        claims.insert(WorkerSource::Shim, worker("pod-1", "http://a:1", None));
        let (source, merged) = claims.worker("w0").unwrap();
        assert_eq!((source, merged.id.as_str(), merged.shim), (WorkerSource::Shim, "w0", true));
        assert_eq!(merged.kv_events.as_deref(), Some("tcp://a:5557"));
        claims.remove(WorkerSource::Shim, "pod-1");
        assert!(!claims.worker("w0").unwrap().1.shim);
        claims.remove(WorkerSource::Config, "w0");
        assert!(claims.worker("w0").is_none());
    }

    #[test]
    fn a_shim_s_worker_is_of_the_group_of_its_pod() {
        let mut claims = Claims::default();
        let mut pod = worker("w0", "http://a:1", None);
        (pod.transfer_group, pod.location) = (Some("r1".into()), Some("z/n".into()));
        claims.insert(WorkerSource::Kubernetes(0), pod);
        claims.insert(WorkerSource::Shim, worker("w0", "http://a:1", None));
        let (source, merged) = claims.worker("w0").unwrap();
        assert_eq!(source, WorkerSource::Shim);
        assert_eq!(merged.transfer_group.as_deref(), Some("r1"));
        assert_eq!(merged.location.as_deref(), Some("z/n"));
    }

    #[test]
    fn a_claim_with_another_address_adds_nothing() {
        let mut claims = Claims::default();
        claims.insert(WorkerSource::Dns(0), worker("w0", "http://a:1", Some("tcp://a:5557")));
        claims.insert(WorkerSource::Shim, worker("w0", "http://a:9", None));
        let merged = claims.worker("w0").unwrap().1;
        assert_eq!((merged.url.as_str(), merged.kv_events), ("http://a:9", None));
    }

    #[test]
    fn a_shim_leads_only_at_the_address_that_is_written_down() {
        for source in [WorkerSource::Config, WorkerSource::Admin] {
            let mut claims = Claims::default();
            claims.insert(WorkerSource::Shim, worker("w0", "http://a:9", None));
            claims.insert(source, worker("w0", "http://a:1", None));
            let (leading, merged) = claims.worker("w0").unwrap();
            assert_eq!((leading, merged.url.as_str(), merged.shim), (source, "http://a:1", false));
            claims.remove(source, "w0");
            assert_eq!(claims.worker("w0").unwrap().0, WorkerSource::Shim);
        }
    }
}
