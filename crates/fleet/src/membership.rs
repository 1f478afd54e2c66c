//! The members of the fleet: which workers it has, which sources reported each, and the tasks that
//! follow each worker.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use http::uri::Authority;
use tokio::task::JoinSet;

use super::claims::{Claims, WorkerSource};
use super::follow::{Tasks, follow};
use super::state::Event;
use super::worker::Worker;
use super::{health, read_back};
use crate::Cluster;
use crate::{ServedModel, ServedModels};
use splitrail_config::model::{Discovery, Model, WorkerConfig};
use splitrail_settings::endpoint::{leads_to, with_one_loopback};
use splitrail_telemetry::{TaskName, restart_on_panic};

mod claim_error;
mod discovered;

pub use claim_error::ClaimError;
use discovered::FollowedSource;

/// Maximum number of workers of one model: the index cannot distinguish more.
pub const WORKERS_MAX: usize = 65_000;

/// Owns the workers of all models. Dropping it ends the tasks that follow the workers.
pub struct Fleet {
    cluster: Arc<Cluster>,
    models: Mutex<BTreeMap<String, Members>>,
    /// Whether the workers of the first configuration have been added.
    has_begun: AtomicBool,
    /// Given to the tasks that the fleet owns: a strong reference would keep the fleet alive.
    own: Weak<Self>,
}

/// One model's workers, by id.
struct Members {
    served: Arc<ServedModel>,
    by_id: BTreeMap<String, Member>,
    /// The task that ejects outliers and ends slow starts.
    health: JoinSet<()>,
    /// The sources of workers that are not listed in the configuration.
    discovery: Vec<FollowedSource>,
}

struct Member {
    claims: Claims,
    leading: WorkerSource,
    worker: Arc<Worker>,
    /// The tasks that follow the worker. They end when this is dropped.
    tasks: Tasks,
}

/// A worker and the sources that report it.
pub struct KnownWorker {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The sources that report the worker, the leading one first.
    pub sources: Vec<WorkerSource>,
}

fn members_of<'a>(
    models: &'a mut BTreeMap<String, Members>,
    model: &str,
) -> Result<&'a mut Members, ClaimError> {
    models.get_mut(model).ok_or_else(|| ClaimError::UnknownModel(model.to_owned()))
}

impl Fleet {
    /// Starts the fleet of a cluster with the workers that are listed in the configuration.
    ///
    /// # Errors
    /// If a listed worker cannot be added. Such a configuration is refused earlier.
    pub fn start(cluster: Arc<Cluster>) -> Result<Arc<Self>, ClaimError> {
        let serving = cluster.serving();
        let fleet = Arc::new_cyclic(|own| Self {
            cluster,
            models: Mutex::default(),
            has_begun: AtomicBool::new(false),
            own: Weak::clone(own),
        });
        fleet.serve(serving)?;
        fleet.has_begun.store(true, Relaxed);
        Ok(fleet)
    }

    /// Replaces what the cluster serves: models are added and removed together with their listed
    /// workers. Workers of other sources stay. Requests find a new model only after its workers
    /// have been added; requests that found a model earlier keep the workers that it had.
    ///
    /// # Errors
    /// If a listed worker cannot be added. Then nothing has changed.
    pub fn serve(&self, serving: Arc<ServedModels>) -> Result<(), ClaimError> {
        let mut models = self.models();
        for served in &serving.models {
            admissible(models.get(served.name()), served)?;
        }
        let mut left = Vec::new();
        for served in &serving.models {
            let none = || self.found(served);
            let members = models.entry(served.name().to_owned()).or_insert_with(none);
            self.change(members, served, &mut left);
            let refused = self.set_members(members, WorkerSource::Config, &served.config.workers);
            refused.into_iter().next().map_or(Ok(()), Err)?;
            self.close_to_shims(members);
        }
        self.cluster.serve(Arc::clone(&serving));
        left.into_iter().for_each(Member::retire);
        for (model, members) in models.extract_if(.., |name, _| serving.model(name).is_none()) {
            read_back::stop(&members.served, &self.cluster.metrics);
            for (id, member) in members.by_id {
                tracing::info!(model, worker = id, "a worker leaves with its model");
                member.retire();
            }
            self.cluster.metrics.forget_model(&model);
        }
        Ok(())
    }

    /// Starts a model without workers, and its discovery.
    fn found(&self, served: &Arc<ServedModel>) -> Members {
        if self.has_begun.load(Relaxed) {
            // Requests of an earlier model of this name may have counted after it was removed.
            self.cluster.metrics.forget_model(served.name());
        }
        let mut members = Members {
            served: Arc::clone(served),
            by_id: BTreeMap::new(),
            health: self.watch(served),
            discovery: Vec::new(),
        };
        self.discover(&mut members, served);
        members
    }

    /// Applies a changed configuration of a model. With the same pool, the tasks that probe its
    /// workers restart; with another pool, its workers are added to that pool and the members of
    /// the old one are moved to `left`.
    fn change(&self, members: &mut Members, served: &Arc<ServedModel>, left: &mut Vec<Member>) {
        if Arc::ptr_eq(&members.served, served) {
            return;
        }
        let before = std::mem::replace(&mut members.served, Arc::clone(served));
        members.health = self.watch(served);
        let same_pool = Arc::ptr_eq(&before.pool, &served.pool);
        if !same_pool {
            read_back::stop(&before, &self.cluster.metrics);
        }
        served.pool.configure(&served.config);
        for member in members.by_id.values_mut() {
            if same_pool {
                member.worker.set_breakers(served.config.breaker);
                let costs = member.worker.config.costs.unwrap_or(served.config.costs);
                member.worker.load.costs.set_prior(costs.into());
                member.worker.set_slow_start(served.config.health.slow_start);
                member.tasks.ask_anew(&self.cluster, served, &member.worker, member.leading);
            } else {
                let config = member.worker.config.clone();
                let (before, leading) = (&member.worker, member.leading);
                let authority = before.address.authority.clone();
                let (worker, tasks) = self.let_in(served, config, authority, leading, Some(before));
                let claims = member.claims.clone();
                let entered = Member { claims, leading, worker, tasks };
                left.push(std::mem::replace(member, entered));
            }
        }
        // Once all workers are in the new pool, because this changes some of them.
        if before.config.discovery != served.config.discovery {
            self.discover(members, &before);
        }
    }

    /// Records that a source reports a worker. A worker with the same address under another id is
    /// the same worker.
    ///
    /// # Errors
    /// If the worker cannot be added: among others, if it would move to the address of another one.
    pub fn claim(
        &self,
        model: &str,
        source: WorkerSource,
        config: WorkerConfig,
    ) -> Result<Arc<Worker>, ClaimError> {
        let mut models = self.models();
        let members = members_of(&mut models, model)?;
        let address = address(&config)?;
        if members.by_id.contains_key(&config.id)
            && let Some(other) = members.named_at(&address).filter(|other| *other != config.id)
        {
            let WorkerConfig { id, url, .. } = config;
            return Err(ClaimError::Taken { id, url, other: other.to_owned() });
        }
        self.claim_in(members, source, config)
    }

    fn claim_in(
        &self,
        members: &mut Members,
        source: WorkerSource,
        mut config: WorkerConfig,
    ) -> Result<Arc<Worker>, ClaimError> {
        let address = address(&config)?;
        if source != WorkerSource::Config {
            self.admit(&config, &address, members.is_written_down(&address))?;
        }
        if source == WorkerSource::Shim && !members.admits_shims(&address) {
            return Err(ClaimError::ClosedToShims(members.served.name().to_owned()));
        }
        let id = members.known_as(&config.id, &address).unwrap_or(&config.id).to_owned();
        if id != config.id
            && let Some(Member { worker, .. }) = members.by_id.get(&id)
        {
            // Found by the address, of which the URL may have another name.
            let known = worker.address.authority.as_str();
            config.url = config.url.replace(address.as_str(), known);
        }
        if members.by_id.len() >= WORKERS_MAX && !members.by_id.contains_key(&id) {
            return Err(ClaimError::Full(members.served.name().to_owned()));
        }
        let claims = members.by_id.get(&id).map(|member| member.claims.clone());
        let mut claims = claims.unwrap_or_default();
        claims.insert(source, config);
        self.settle(members, &id, claims)
    }

    /// Whether a worker at an address is listed in the configuration.
    pub fn is_written_down(&self, model: &str, address: &Authority) -> bool {
        self.models().get(model).is_some_and(|members| members.is_written_down(address))
    }

    /// Whether an operator has given a worker of this id another address, in the configuration or
    /// on the admin listener.
    pub fn is_written_elsewhere(&self, model: &str, id: &str, address: &Authority) -> bool {
        let models = self.models();
        let member = models.get(model).and_then(|members| members.by_id.get(id));
        let written = member.and_then(|member| member.claims.written());
        written.is_some_and(|worker| self::address(worker).is_ok_and(|there| there != *address))
    }

    /// The id of the worker at an address, if there is one.
    pub fn name_at(&self, model: &str, address: &Authority) -> Option<String> {
        let models = self.models();
        models.get(model)?.named_at(address).map(str::to_owned)
    }

    /// Checks the URLs of a worker that is reported by a source other than the configuration,
    /// including those of its events: each host must lie within the allowed networks or be the host
    /// of a listed worker at the same address. Host names are resolved and checked when they are
    /// connected to.
    fn admit(
        &self,
        config: &WorkerConfig,
        address: &Authority,
        is_written_down: bool,
    ) -> Result<(), ClaimError> {
        let own = self.cluster.own_addresses.get().map(Vec::as_slice).unwrap_or_default();
        if own.iter().any(|own| leads_to(address.as_str(), *own)) {
            return Err(ClaimError::OwnAddress { id: config.id.clone(), url: config.url.clone() });
        }
        let networks = &self.cluster.networks;
        let beside =
            [config.bootstrap.as_deref(), config.written_events(), config.kv_replay.as_deref()];
        for url in [Some(config.url.as_str())].into_iter().chain(beside).flatten() {
            let uri = url.parse::<http::Uri>().ok();
            let host = uri.as_ref().and_then(|uri| uri.host()).unwrap_or_default();
            let is_own = is_written_down && host == address.host();
            if !is_own && !networks.admit_host(host) {
                return Err(ClaimError::Outside { id: config.id.clone(), url: url.to_owned() });
            }
        }
        Ok(())
    }

    /// Withdraws a source's report of a worker, by the id that the source uses.
    pub fn revoke(&self, model: &str, source: WorkerSource, id: &str) {
        let mut models = self.models();
        if let Some(members) = models.get_mut(model) {
            self.revoke_in(members, source, id);
        }
    }

    fn revoke_in(&self, members: &mut Members, source: WorkerSource, id: &str) {
        let known = members.by_id.iter().find(|(_, member)| member.claims.has(source, id));
        let Some((name, member)) = known else { return };
        let (name, mut claims) = (name.clone(), member.claims.clone());
        claims.remove(source, id);
        if let Err(error) = self.settle(members, &name, claims) {
            // The remaining reports were accepted before.
            let (model, worker) = (members.served.name(), name);
            tracing::error!(model, worker, %error, "a worker could not be updated after a source withdrew it");
        }
    }

    /// Replaces all that a source reports of a model: workers that are not in the list are
    /// withdrawn.
    ///
    /// # Errors
    /// The error of the first worker that cannot be added. All others are added.
    pub fn set_source(
        &self,
        model: &str,
        source: WorkerSource,
        workers: &[WorkerConfig],
    ) -> Result<(), ClaimError> {
        let mut models = self.models();
        let refused = self.set_members(members_of(&mut models, model)?, source, workers);
        refused.into_iter().next().map_or(Ok(()), Err)
    }

    /// New workers are added before old ones are removed, so that a worker that gets a new id is
    /// never missing. Those with known ids come first: one of them may leave an address to a new id.
    /// Returns why workers cannot be added; all others are.
    fn set_members(
        &self,
        members: &mut Members,
        source: WorkerSource,
        workers: &[WorkerConfig],
    ) -> Vec<ClaimError> {
        let claimed = members.by_id.values().flat_map(|member| member.claims.named_by(source));
        let kept: HashSet<_> = workers.iter().map(|worker| worker.id.as_str()).collect();
        let gone = claimed.filter(|id| !kept.contains(id)).map(str::to_owned);
        let gone: HashSet<String> = gone.collect();
        let mut refused = Vec::new();
        let is_known = |worker: &&WorkerConfig| members.by_id.contains_key(&worker.id);
        let (known, new): (Vec<_>, Vec<_>) = workers.iter().partition(is_known);
        for worker in known.into_iter().chain(new) {
            let renamed = members.rename(source, worker, &gone);
            if let Some(before) = &renamed {
                self.cluster.metrics.forget_worker(members.served.name(), before);
            }
            let claimed = self.claim_in(members, source, worker.clone());
            if renamed.is_some() && claimed.is_err() {
                // No source reports it any more: neither by the id before, nor by the refused one.
                let _left = self.settle(members, &worker.id, Claims::default());
            }
            refused.extend(claimed.err());
        }
        for id in &gone {
            self.revoke_in(members, source, id);
        }
        refused
    }

    /// Drains a worker or ends its draining for an operator; `None` if the worker is unknown.
    pub fn drain(&self, model: &str, id: &str, draining: bool) -> Option<Arc<Worker>> {
        // The lock keeps the worker from being replaced meanwhile by one that would not be drained.
        let models = self.models();
        let worker = &models.get(model)?.by_id.get(id)?.worker;
        let why = if draining { "an operator drains it" } else { "an operator wants it back" };
        worker.set_draining(draining, why);
        Some(Arc::clone(worker))
    }

    /// The id that a source uses for the worker with this id.
    pub fn named_by(&self, model: &str, source: WorkerSource, id: &str) -> Option<String> {
        let models = self.models();
        let member = models.get(model)?.by_id.get(id)?;
        member.claims.named_by(source).next().map(str::to_owned)
    }

    /// The worker with this id and the sources that report it.
    pub fn known(&self, model: &str, id: &str) -> Option<KnownWorker> {
        let models = self.models();
        let member = models.get(model)?.by_id.get(id)?;
        let sources = member.claims.sources().collect();
        Some(KnownWorker { worker: Arc::clone(&member.worker), sources })
    }

    /// Adds, replaces, keeps or removes one worker so that it matches its claims.
    fn settle(
        &self,
        members: &mut Members,
        id: &str,
        claims: Claims,
    ) -> Result<Arc<Worker>, ClaimError> {
        let served = Arc::clone(&members.served);
        let Some((leading, config)) = claims.worker(id) else {
            let Some(member) = members.by_id.remove(id) else {
                return Err(ClaimError::UnknownModel(served.name().to_owned()));
            };
            self.let_go(&served, &member);
            self.cluster.metrics.forget_worker(served.name(), id);
            return Ok(member.worker);
        };
        if let Some(member) = members.by_id.get_mut(id)
            && member.leading == leading
            && member.worker.config == config
        {
            member.claims = claims;
            return Ok(Arc::clone(&member.worker));
        }
        let authority = address(&config)?;
        let before = members.by_id.remove(id);
        let predecessor = before.as_ref().map(|member| &*member.worker);
        let (worker, tasks) = self.let_in(&served, config, authority, leading, predecessor);
        if let Some(member) = before {
            self.let_go(&served, &member);
            if member.worker.config.role != worker.config.role {
                self.cluster.metrics.forget_worker(served.name(), id);
            }
        }
        let member = Member { claims, leading, worker: Arc::clone(&worker), tasks };
        members.by_id.insert(id.to_owned(), member);
        Ok(worker)
    }

    fn let_in(
        &self,
        served: &Arc<ServedModel>,
        config: WorkerConfig,
        authority: Authority,
        leading: WorkerSource,
        predecessor: Option<&Worker>,
    ) -> (Arc<Worker>, Tasks) {
        let Model { breaker, health, .. } = &served.config;
        let transitions = self.cluster.metrics.worker_transitions.clone();
        let written = &served.config.workers;
        let written_down = written.iter().any(|worker| worker.url == config.url);
        let publisher = (&config.kv_events, &config.kv_replay);
        let has_events =
            |worker: &WorkerConfig| (&worker.kv_events, &worker.kv_replay) == publisher;
        let events_written_down = written.iter().any(has_events);
        let worker = served.pool.enter(|number| {
            let mut worker = Worker::new(number, config, authority);
            worker.set_breakers(*breaker);
            worker.engine.kind = served.config.engine();
            worker.address.guarded = !written_down;
            worker.address.guards_events = !events_written_down;
            let costs = worker.config.costs.unwrap_or(served.config.costs);
            worker.load.costs.set_prior(costs.into());
            worker.load.costs.notify_when_freed(served.pool.waiting.freed());
            let worker = worker.watched(served.name(), health, transitions);
            let worker = worker.with_counts(served.name(), &self.cluster.metrics);
            worker.health.initial_member.store(!self.has_begun.load(Relaxed), Relaxed);
            if let Some(predecessor) = predecessor {
                worker.succeed_to(predecessor);
            }
            worker
        });
        tracing::info!(
            model = served.name(),
            worker = worker.id(),
            url = worker.config.url,
            role = worker.config.role.name(),
            source = leading.name(),
            "a worker joins"
        );
        let tasks = follow(&self.cluster, served, &worker, leading);
        (worker, tasks)
    }

    fn let_go(&self, served: &ServedModel, member: &Member) {
        let Member { worker, .. } = member;
        worker.health.lifecycle.change(Event::Leave, "no source reports the worker any more");
        served.pool.leave(worker);
    }

    /// Starts the tasks that watch over a model's workers.
    fn watch(&self, served: &Arc<ServedModel>) -> JoinSet<()> {
        let mut watching = JoinSet::new();
        let name = |task| TaskName::of_model(task, served.name());
        let (watched, swept) = (Arc::clone(served), Arc::clone(served));
        let metrics = Arc::clone(&self.cluster.metrics);
        let sweep = move || read_back::run(Arc::clone(&swept), Arc::clone(&metrics));
        watching.spawn(restart_on_panic(name("health"), move || health::run(Arc::clone(&watched))));
        watching.spawn(restart_on_panic(name("read-back"), sweep));
        watching
    }

    fn models(&self) -> MutexGuard<'_, BTreeMap<String, Members>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// Stops following a worker whose pool is no longer served. Requests that still use that pool
    /// may still choose it.
    fn retire(self) {
        self.worker.gone.cancel();
    }
}

impl Members {
    fn is_written_down(&self, at: &Authority) -> bool {
        let mut workers = self.served.config.workers.iter();
        workers.any(|worker| address(worker).is_ok_and(|written| written == *at))
    }

    /// Whether the shim of a worker at an address may attach.
    fn admits_shims(&self, at: &Authority) -> bool {
        self.served.config.discovery.contains(&Discovery::Shim {}) || self.is_written_down(at)
    }

    /// The id of the member with this id, or otherwise of the member at this address.
    fn known_as<'a>(&'a self, id: &'a str, address: &Authority) -> Option<&'a str> {
        if self.by_id.contains_key(id) {
            return Some(id);
        }
        self.named_at(address)
    }

    /// The id of the member at an address.
    fn named_at(&self, address: &Authority) -> Option<&str> {
        let same = |(_, member): &(&String, &Member)| {
            is_same_place(&member.worker.address.authority, address)
        };
        self.by_id.iter().find(same).map(|(id, _)| id.as_str())
    }

    /// Renames a worker if its only source gives it a new id. Returns the id before.
    fn rename(
        &mut self,
        source: WorkerSource,
        worker: &WorkerConfig,
        gone: &HashSet<String>,
    ) -> Option<String> {
        let address = address(worker).ok()?;
        let before = self.known_as(&worker.id, &address)?.to_owned();
        let only = self.by_id.get(&before)?.claims.sources().eq([source]);
        if before == worker.id || !gone.contains(&before) || !only {
            return None;
        }
        let mut member = self.by_id.remove(&before)?;
        member.claims = Claims::default();
        self.by_id.insert(worker.id.clone(), member);
        Some(before)
    }
}

/// Checks that all listed workers of a model can be added to its current members.
fn admissible(members: Option<&Members>, served: &ServedModel) -> Result<(), ClaimError> {
    let workers = &served.config.workers;
    workers.iter().try_for_each(|worker| address(worker).map(|_| ()))?;
    // Workers that leave are removed after the new ones are added, so they count here.
    let known = members.map_or(0, |members| members.by_id.len());
    let is_new = |worker: &&WorkerConfig| {
        members.is_none_or(|members| !members.by_id.contains_key(&worker.id))
    };
    let all = known + workers.iter().filter(|worker| is_new(worker)).count();
    let fits = all <= WORKERS_MAX;
    fits.then_some(()).ok_or_else(|| ClaimError::Full(served.name().to_owned()))
}

/// Whether two addresses are the same, be it by different names of the loopback.
fn is_same_place(one: &Authority, other: &Authority) -> bool {
    let (one_port, other_port) = (one.port_u16(), other.port_u16());
    one == other
        || one_port == other_port
            && with_one_loopback(one.as_str()) == with_one_loopback(other.as_str())
}

fn address(config: &WorkerConfig) -> Result<Authority, ClaimError> {
    let parsed = config.url.parse::<http::Uri>().ok();
    parsed
        .and_then(|uri| uri.into_parts().authority)
        .ok_or_else(|| ClaimError::NoAddress { id: config.id.clone(), url: config.url.clone() })
}

#[cfg(test)]
mod tests;
