//! Keeps the fleet: who is in it, on whose word, and the tasks that follow each worker.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::uri::Authority;
use tokio::task::JoinSet;

use super::claims::{Claims, Source};
use super::follow::follow;
use super::health;
use super::state::Event;
use super::worker::Worker;
use crate::config::model::{Model, Worker as WorkerConfig};
use crate::core::{Core, Served};

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
    core: Arc<Core>,
    models: Mutex<BTreeMap<String, Members>>,
    /// Whether the first workers are in.
    has_begun: AtomicBool,
}

/// One model's workers by name.
struct Members {
    served: Arc<Served>,
    by_id: BTreeMap<String, Member>,
    /// Compares its workers with each other.
    _health: JoinSet<()>,
}

struct Member {
    claims: Claims,
    leading: Source,
    worker: Arc<Worker>,
    /// What follows the worker; ends with it.
    _tasks: JoinSet<()>,
}

/// A worker with those who say that it is there.
pub struct Known {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Who says so, the leading one first.
    pub sources: Vec<Source>,
}

impl Fleet {
    /// The fleet of what a core serves: at first, the configuration's workers.
    ///
    /// # Errors
    /// A worker of the configuration that cannot be let in; such are refused before.
    pub fn start(core: Arc<Core>) -> Result<Arc<Self>, ClaimError> {
        let fleet = Self { core, models: Mutex::default(), has_begun: AtomicBool::new(false) };
        fleet.follow_configuration()?;
        fleet.has_begun.store(true, Relaxed);
        Ok(Arc::new(fleet))
    }

    /// Takes over what the core serves now: models come and go, and the configuration's
    /// workers with them. Workers of other sources stay.
    ///
    /// # Errors
    /// A worker of the configuration that cannot be let in.
    pub fn follow_configuration(&self) -> Result<(), ClaimError> {
        let serving = self.core.serving();
        {
            let mut models = self.models();
            let gone: Vec<_> =
                models.keys().filter(|name| serving.model(name).is_none()).cloned().collect();
            for model in gone.iter().filter_map(|name| models.remove(name)) {
                model.by_id.into_values().for_each(|member| self.let_go(&model.served, &member));
            }
            for served in &serving.models {
                match models.get_mut(served.name()) {
                    Some(members) => self.change(members, served),
                    None => {
                        let members = Members::new(Arc::clone(served));
                        models.insert(served.name().to_owned(), members);
                    }
                }
            }
        }
        for served in &serving.models {
            self.set_source(served.name(), Source::Config, &served.config.workers)?;
        }
        Ok(())
    }

    /// A model's configuration has changed: its workers are followed anew, and enter again
    /// where the index is another.
    fn change(&self, members: &mut Members, served: &Arc<Served>) {
        if Arc::ptr_eq(&members.served, served) {
            return;
        }
        let before = std::mem::replace(&mut members.served, Arc::clone(served));
        members._health = watch(served);
        let same_pool = Arc::ptr_eq(&before.pool, &served.pool);
        for member in members.by_id.values_mut() {
            if same_pool {
                member._tasks = follow(&self.core, served, &member.worker, member.leading);
            } else {
                self.let_go(&before, member);
                let Worker { config, authority, .. } = member.worker.as_ref();
                let (config, authority) = (config.clone(), authority.clone());
                let (worker, tasks) = self.let_in(served, config, authority, member.leading);
                (member.worker, member._tasks) = (worker, tasks);
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
        let unknown = || ClaimError::UnknownModel(model.to_owned());
        let members = models.get_mut(model).ok_or_else(unknown)?;
        let address = address(&config)?;
        if source != Source::Config && !members.is_written_down(&address) {
            self.admit(&config, &address)?;
        }
        let id = members.known_as(&config.id, &address).unwrap_or(&config.id).to_owned();
        if members.by_id.len() >= WORKERS_MAX && !members.by_id.contains_key(&id) {
            return Err(ClaimError::Full(model.to_owned()));
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

    /// Whether a worker that is not written down may be where it is said to be. Names are
    /// looked up when they are connected to.
    fn admit(&self, config: &WorkerConfig, address: &Authority) -> Result<(), ClaimError> {
        let networks = &self.core.networks;
        let bootstrap = config.bootstrap.as_deref().and_then(|url| url.parse::<http::Uri>().ok());
        let beside = bootstrap.as_ref().and_then(|uri| uri.host());
        if networks.admit_host(address.host()) && beside.is_none_or(|h| networks.admit_host(h)) {
            return Ok(());
        }
        Err(ClaimError::Outside { id: config.id.clone(), url: config.url.clone() })
    }

    /// A source takes back its word on a worker, by the name that it gave.
    pub fn revoke(&self, model: &str, source: Source, id: &str) {
        let mut models = self.models();
        let Some(members) = models.get_mut(model) else { return };
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
        let named: Vec<String> = {
            let models = self.models();
            let members = models.get(model).into_iter().flat_map(|members| members.by_id.values());
            members.flat_map(|member| member.claims.named_by(source)).map(str::to_owned).collect()
        };
        for id in named.iter().filter(|id| !workers.iter().any(|worker| worker.id == **id)) {
            self.revoke(model, source, id);
        }
        let mut result = Ok(());
        for worker in workers {
            let claimed = self.claim(model, source, worker.clone());
            result = result.and(claimed.map(|_| ()));
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
            self.core.metrics.forget_worker(served.name(), id);
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
        if let Some(member) = members.by_id.remove(id) {
            self.let_go(&served, &member);
        }
        let (worker, tasks) = self.let_in(&served, config, authority, leading);
        let member = Member { claims, leading, worker: Arc::clone(&worker), _tasks: tasks };
        members.by_id.insert(id.to_owned(), member);
        Ok(worker)
    }

    fn let_in(
        &self,
        served: &Arc<Served>,
        config: WorkerConfig,
        authority: Authority,
        leading: Source,
    ) -> (Arc<Worker>, JoinSet<()>) {
        let written_down = served.config.workers.iter().any(|worker| worker.url == config.url);
        let Model { breaker, health, .. } = &served.config;
        let transitions = self.core.metrics.worker_transitions.clone();
        let worker = served.pool.enter(|number| {
            let worker = Worker::new(number, config, authority).with_breakers(*breaker);
            let worker = worker.with_guard(!written_down);
            let worker = worker.watched(served.name(), health, transitions);
            if self.has_begun.load(Relaxed) { worker } else { worker.founding() }
        });
        tracing::info!(
            model = served.name(),
            worker = worker.id(),
            url = worker.config.url,
            role = worker.config.role.name(),
            source = leading.name(),
            "a worker joins"
        );
        let tasks = follow(&self.core, served, &worker, leading);
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

impl Members {
    fn new(served: Arc<Served>) -> Self {
        let _health = watch(&served);
        Self { served, by_id: BTreeMap::new(), _health }
    }

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
}

fn watch(served: &Arc<Served>) -> JoinSet<()> {
    let mut watching = JoinSet::new();
    watching.spawn(health::run(Arc::clone(served)));
    watching
}

fn address(config: &WorkerConfig) -> Result<Authority, ClaimError> {
    let parsed = config.url.parse::<http::Uri>().ok();
    parsed
        .and_then(|uri| uri.into_parts().authority)
        .ok_or_else(|| ClaimError::NoAddress { id: config.id.clone(), url: config.url.clone() })
}
