//! Membership of the fleet: which workers are in it, which source named each, and the tasks that follow each worker.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use http::uri::Authority;
use tokio::task::JoinSet;

use super::claims::{Claims, Source};
use super::follow::{Tasks, follow};
use super::state::Event;
use super::worker::Worker;
use super::{discovery, health};
use crate::Cluster;
use crate::{Served, Serving};
use splitrail_config::model::{Model, Worker as WorkerConfig};

/// Why a worker cannot be let in.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Its model is not served here.
    #[error("model {0} is not served")]
    UnknownModel(String),
    /// Its address is none.
    #[error("worker {id}: {url} is not an address")]
    NoAddress {
        /// The worker's name.
        id: String,
        /// What it has for an address.
        url: String,
    },
    /// It is not written down, and where nothing else may be.
    #[error("worker {id}: {url} lies outside fleet.networks")]
    Outside {
        /// The worker's name.
        id: String,
        /// Its address.
        url: String,
    },
    /// There are as many as the index can tell apart.
    #[error("model {0} has as many workers as can be")]
    Full(String),
}

/// Workers of one model: the index tells no more apart.
pub const WORKERS_MAX: usize = 65_000;

/// The fleet's keeper. Dropped, it ends the tasks that follow the workers.
pub struct Fleet {
    cluster: Arc<Cluster>,
    models: Mutex<BTreeMap<String, Members>>,
    /// Whether the first workers are in.
    has_begun: AtomicBool,
    /// For the tasks that it owns, which must not keep it.
    own: Weak<Self>,
}

/// One model's workers by name.
struct Members {
    served: Arc<Served>,
    by_id: BTreeMap<String, Member>,
    /// Compares its workers with each other.
    health: JoinSet<()>,
    /// Looks for workers that nobody wrote down.
    discovery: JoinSet<()>,
}

struct Member {
    claims: Claims,
    leading: Source,
    worker: Arc<Worker>,
    /// What follows the worker; ends with it.
    tasks: Tasks,
}

/// A worker with those who say that it is there.
pub struct Known {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Who says so, the leading one first.
    pub sources: Vec<Source>,
}

fn members_of<'a>(
    models: &'a mut BTreeMap<String, Members>,
    model: &str,
) -> Result<&'a mut Members, ClaimError> {
    models.get_mut(model).ok_or_else(|| ClaimError::UnknownModel(model.to_owned()))
}

impl Fleet {
    /// The fleet of what a cluster serves: at first, the configuration's workers.
    ///
    /// # Errors
    /// A worker of the configuration that cannot be let in; such are refused before.
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

    /// From now on, the cluster serves this: models come and go, and the configuration's workers
    /// with them. Workers of other sources stay. No request finds a model before its workers
    /// are there; those that found it earlier keep the workers that it had.
    ///
    /// # Errors
    /// A worker of the configuration that cannot be let in: then nothing has changed.
    pub fn serve(&self, serving: Arc<Serving>) -> Result<(), ClaimError> {
        let mut models = self.models();
        for served in &serving.models {
            admissible(models.get(served.name()), served)?;
        }
        let mut left = Vec::new();
        for served in &serving.models {
            let none = || self.found(served);
            let members = models.entry(served.name().to_owned()).or_insert_with(none);
            self.change(members, served, &mut left);
            self.set_members(members, Source::Config, &served.config.workers)?;
        }
        self.cluster.serve(Arc::clone(&serving));
        left.into_iter().for_each(Member::retire);
        for (model, members) in models.extract_if(.., |name, _| serving.model(name).is_none()) {
            for (id, member) in members.by_id {
                tracing::info!(model, worker = id, "a worker leaves with its model");
                member.retire();
                self.cluster.metrics.forget_worker(&model, &id);
            }
        }
        Ok(())
    }

    /// A model of nobody so far, whose sources are asked.
    fn found(&self, served: &Arc<Served>) -> Members {
        let mut members = Members {
            served: Arc::clone(served),
            by_id: BTreeMap::new(),
            health: watch(served),
            discovery: JoinSet::new(),
        };
        self.discover(&mut members, served);
        members
    }

    /// Asks a model's sources from now on, and no others.
    fn discover(&self, members: &mut Members, before: &Served) {
        members.discovery = JoinSet::new();
        let kept: Vec<Source> = discovery::kinds(&members.served.config).collect();
        for source in discovery::kinds(&before.config) {
            if !kept.contains(&source) {
                // Nobody is among those of a source that is not there.
                let _none = self.set_members(members, source, &[]);
            }
        }
        let Members { served, discovery, .. } = members;
        let mut tasks = JoinSet::new();
        for source in discovery::follow(&served.config, &self.cluster.metrics, &mut tasks) {
            let origin = kept[source.place];
            let (fleet, model) = (Weak::clone(&self.own), served.name().to_owned());
            tasks.spawn(discovery::enter(fleet, model, origin, source));
        }
        *discovery = tasks;
    }

    /// A model's configuration has changed: its workers are asked anew, or enter again where
    /// the pool is another. Those of the pool before go to `left`.
    fn change(&self, members: &mut Members, served: &Arc<Served>, left: &mut Vec<Member>) {
        if Arc::ptr_eq(&members.served, served) {
            return;
        }
        let before = std::mem::replace(&mut members.served, Arc::clone(served));
        members.health = watch(served);
        if before.config.discovery != served.config.discovery {
            self.discover(members, &before);
        }
        let same_pool = Arc::ptr_eq(&before.pool, &served.pool);
        served.pool.configure(&served.config);
        for member in members.by_id.values_mut() {
            if same_pool {
                member.worker.set_breakers(served.config.breaker);
                let costs = member.worker.config.costs.unwrap_or(served.config.costs);
                member.worker.costs.set_prior(costs.into());
                member.worker.set_slow_start(served.config.health.slow_start);
                member.tasks.ask_anew(&self.cluster, served, &member.worker, member.leading);
            } else {
                let config = member.worker.config.clone();
                let (before, leading) = (&member.worker, member.leading);
                let authority = before.authority.clone();
                let (worker, tasks) = self.let_in(served, config, authority, leading, Some(before));
                let claims = member.claims.clone();
                let entered = Member { claims, leading, worker, tasks };
                left.push(std::mem::replace(member, entered));
            }
        }
    }

    /// A source's word that a worker is there. The same engine under another name, by its
    /// address, is the same worker.
    ///
    /// # Errors
    /// If it cannot be let in.
    pub fn claim(
        &self,
        model: &str,
        source: Source,
        config: WorkerConfig,
    ) -> Result<Arc<Worker>, ClaimError> {
        let mut models = self.models();
        self.claim_in(members_of(&mut models, model)?, source, config)
    }

    fn claim_in(
        &self,
        members: &mut Members,
        source: Source,
        config: WorkerConfig,
    ) -> Result<Arc<Worker>, ClaimError> {
        let address = address(&config)?;
        if source != Source::Config {
            self.admit(&config, &address, members.is_written_down(&address))?;
        }
        let id = members.known_as(&config.id, &address).unwrap_or(&config.id).to_owned();
        if members.by_id.len() >= WORKERS_MAX && !members.by_id.contains_key(&id) {
            return Err(ClaimError::Full(members.served.name().to_owned()));
        }
        let claims = members.by_id.get(&id).map(|member| member.claims.clone());
        let mut claims = claims.unwrap_or_default();
        claims.insert(source, config);
        self.settle(members, &id, claims)
    }

    /// Whether the configuration has a worker at an address.
    pub fn is_written_down(&self, model: &str, address: &Authority) -> bool {
        self.models().get(model).is_some_and(|members| members.is_written_down(address))
    }

    /// Whether an operator, in the file or at the admin listener, has written a worker of this
    /// name down at another address.
    pub fn is_written_elsewhere(&self, model: &str, id: &str, address: &Authority) -> bool {
        let models = self.models();
        let member = models.get(model).and_then(|members| members.by_id.get(id));
        let written = member.and_then(|member| member.claims.written());
        written.is_some_and(|worker| self::address(worker).is_ok_and(|there| there != *address))
    }

    /// The name of the worker at an address, if there is one.
    pub fn name_at(&self, model: &str, address: &Authority) -> Option<String> {
        let models = self.models();
        let mut members = models.get(model)?.by_id.iter();
        let found = members.find(|(_, member)| member.worker.authority == *address);
        found.map(|(id, _)| id.clone())
    }

    /// Whether a worker may be where a source other than the file says that it is, and publish
    /// its events there; its own host may be written down. Names are looked up when they are
    /// connected to.
    fn admit(
        &self,
        config: &WorkerConfig,
        address: &Authority,
        is_written_down: bool,
    ) -> Result<(), ClaimError> {
        let networks = &self.cluster.networks;
        let beside = [&config.bootstrap, &config.kv_events, &config.kv_replay];
        for url in [Some(&config.url)].into_iter().chain(beside.map(Option::as_ref)).flatten() {
            let uri = url.parse::<http::Uri>().ok();
            let host = uri.as_ref().and_then(|uri| uri.host()).unwrap_or_default();
            let is_own = is_written_down && host == address.host();
            if !is_own && !networks.admit_host(host) {
                return Err(ClaimError::Outside { id: config.id.clone(), url: url.clone() });
            }
        }
        Ok(())
    }

    /// A source takes back its word on a worker, by the name that it gave.
    pub fn revoke(&self, model: &str, source: Source, id: &str) {
        let mut models = self.models();
        if let Some(members) = models.get_mut(model) {
            self.revoke_in(members, source, id);
        }
    }

    fn revoke_in(&self, members: &mut Members, source: Source, id: &str) {
        let known = members.by_id.iter().find(|(_, member)| member.claims.has(source, id));
        let Some((name, member)) = known else { return };
        let (name, mut claims) = (name.clone(), member.claims.clone());
        claims.remove(source, id);
        if let Err(error) = self.settle(members, &name, claims) {
            // What is left was let in before.
            tracing::error!(worker = name, %error, "a worker could not be kept");
        }
    }

    /// All that a source knows of a model: who is not among them, it takes back.
    ///
    /// # Errors
    /// The first that cannot be let in; the others are.
    pub fn set_source(
        &self,
        model: &str,
        source: Source,
        workers: &[WorkerConfig],
    ) -> Result<(), ClaimError> {
        let mut models = self.models();
        self.set_members(members_of(&mut models, model)?, source, workers)
    }

    /// Who comes is there before others leave: a worker under a new name is not missed.
    fn set_members(
        &self,
        members: &mut Members,
        source: Source,
        workers: &[WorkerConfig],
    ) -> Result<(), ClaimError> {
        let claimed = members.by_id.values().flat_map(|member| member.claims.named_by(source));
        let kept: HashSet<_> = workers.iter().map(|worker| worker.id.as_str()).collect();
        let gone = claimed.filter(|id| !kept.contains(id)).map(str::to_owned);
        let gone: HashSet<String> = gone.collect();
        let mut result = Ok(());
        for worker in workers {
            if let Some(before) = members.rename(source, worker, &gone) {
                self.cluster.metrics.forget_worker(members.served.name(), &before);
            }
            let claimed = self.claim_in(members, source, worker.clone());
            result = result.and(claimed.map(|_| ()));
        }
        for id in &gone {
            self.revoke_in(members, source, id);
        }
        result
    }

    /// Wants no new work on a worker, or wants it again; `None` if it is not there, else
    /// whether that is news.
    pub fn drain(&self, model: &str, id: &str, draining: bool) -> Option<bool> {
        let worker = self.known(model, id)?.worker;
        let why = if draining { "an operator drains it" } else { "an operator wants it back" };
        Some(worker.set_draining(draining, why))
    }

    /// The name by which a source calls the worker of a name.
    pub fn named_by(&self, model: &str, source: Source, id: &str) -> Option<String> {
        let models = self.models();
        let member = models.get(model)?.by_id.get(id)?;
        member.claims.named_by(source).next().map(str::to_owned)
    }

    /// The worker of a name, with those who say that it is there.
    pub fn known(&self, model: &str, id: &str) -> Option<Known> {
        let models = self.models();
        let member = models.get(model)?.by_id.get(id)?;
        let sources = member.claims.sources().collect();
        Some(Known { worker: Arc::clone(&member.worker), sources })
    }

    /// Makes the fleet agree with what is claimed of one worker.
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
        served: &Arc<Served>,
        config: WorkerConfig,
        authority: Authority,
        leading: Source,
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
            let worker = Worker::new(number, config, authority).with_breakers(*breaker);
            let worker = worker.with_guard(!written_down, !events_written_down);
            let costs = worker.config.costs.unwrap_or(served.config.costs);
            worker.costs.set_prior(costs.into());
            worker.costs.tell(served.pool.waiting.freed());
            let worker = worker.watched(served.name(), health, transitions);
            let worker = worker.with_counts(served.name(), &self.cluster.metrics);
            let worker = if self.has_begun.load(Relaxed) { worker } else { worker.founding() };
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

    fn let_go(&self, served: &Served, member: &Member) {
        let Member { worker, .. } = member;
        worker.life.change(Event::Leave, "nobody says any more that it is there");
        served.pool.leave(worker);
    }

    fn models(&self) -> MutexGuard<'_, BTreeMap<String, Members>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// Its pool is no longer served: nobody follows it any more, but requests under way with
    /// that pool may still be given to it.
    fn retire(self) {
        self.worker.gone.cancel();
    }
}

impl Members {
    fn is_written_down(&self, at: &Authority) -> bool {
        let mut workers = self.served.config.workers.iter();
        workers.any(|worker| address(worker).is_ok_and(|written| written == *at))
    }

    /// The name of the worker that is claimed, if it is there: by name, else by address.
    fn known_as<'a>(&'a self, id: &'a str, address: &Authority) -> Option<&'a str> {
        if self.by_id.contains_key(id) {
            return Some(id);
        }
        let same = |(_, member): &(&String, &Member)| member.worker.authority == *address;
        self.by_id.iter().find(same).map(|(id, _)| id.as_str())
    }

    /// Where the one source of a worker gives it another name, it gets that; says the one
    /// before.
    fn rename(
        &mut self,
        source: Source,
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

fn watch(served: &Arc<Served>) -> JoinSet<()> {
    let mut watching = JoinSet::new();
    watching.spawn(health::run(Arc::clone(served)));
    watching
}

/// Whether the workers of a model's configuration can all be let in beside those of others.
fn admissible(members: Option<&Members>, served: &Served) -> Result<(), ClaimError> {
    let workers = &served.config.workers;
    workers.iter().try_for_each(|worker| address(worker).map(|_| ()))?;
    // Who leaves does so when the new ones are there.
    let known = members.map_or(0, |members| members.by_id.len());
    let is_new = |worker: &&WorkerConfig| {
        members.is_none_or(|members| !members.by_id.contains_key(&worker.id))
    };
    let all = known + workers.iter().filter(|worker| is_new(worker)).count();
    let fits = all <= WORKERS_MAX;
    fits.then_some(()).ok_or_else(|| ClaimError::Full(served.name().to_owned()))
}

fn address(config: &WorkerConfig) -> Result<Authority, ClaimError> {
    let parsed = config.url.parse::<http::Uri>().ok();
    parsed
        .and_then(|uri| uri.into_parts().authority)
        .ok_or_else(|| ClaimError::NoAddress { id: config.id.clone(), url: config.url.clone() })
}
