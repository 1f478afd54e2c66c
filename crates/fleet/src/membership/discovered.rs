//! The sources of a model's workers that are not listed in the configuration: each is followed as long
//! as it is configured, whatever else a reload changes.

use std::sync::{Arc, Weak};

use splitrail_config::model::Discovery;
use splitrail_discovery::{FoundWorkers, SourceFollower};
use splitrail_telemetry::{TaskName, restart_on_panic};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;

use super::{Fleet, Member, Members};
use crate::{ServedModel, WorkerSource};

/// A source that is followed. Dropping this ends its tasks.
pub(super) struct FollowedSource {
    discovery: Discovery,
    _tasks: [JoinSet<()>; 2],
}

/// The lists of a source, and the one that is being passed to the fleet.
struct Lists {
    found: mpsc::Receiver<FoundWorkers>,
    pending: Option<FoundWorkers>,
}

impl Fleet {
    /// Follows a model's sources. Those that were followed before are left alone, since what they know
    /// says how long addresses are kept that DNS no longer has. A source that takes the place of
    /// another one takes over its workers until it has a list of its own; the other sources that are
    /// no longer configured lose theirs.
    pub(super) fn discover(&self, members: &mut Members, before: &ServedModel) {
        let served = Arc::clone(&members.served);
        let moved = |source: WorkerSource| match source {
            WorkerSource::Shim | WorkerSource::Admin | WorkerSource::Config => Some(source),
            WorkerSource::Kubernetes(_) | WorkerSource::Dns(_) => {
                source.moved(&before.config, &served.config)
            }
        };
        self.move_claims(members, moved);
        splitrail_discovery::forget(&before.config, &served.config, &self.cluster.metrics);
        let mut followed = std::mem::take(&mut members.discovery);
        for discovery in &served.config.discovery {
            let known = followed.iter().position(|source| source.discovery == *discovery);
            let source = match known {
                Some(known) => Some(followed.swap_remove(known)),
                None => self.follow_source(&served, discovery),
            };
            members.discovery.extend(source);
        }
    }

    /// Withdraws the reports of shims that may not attach any more.
    pub(super) fn close_to_shims(&self, members: &mut Members) {
        let is_closed = |member: &&Member| !members.admits_shims(&member.worker.address.authority);
        let closed = members.by_id.values().filter(is_closed);
        let ids = closed.flat_map(|member| member.claims.named_by(WorkerSource::Shim));
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        for id in ids {
            self.revoke_in(members, WorkerSource::Shim, &id);
        }
    }

    /// Gives the reports of each source to the one that takes its place.
    fn move_claims(
        &self,
        members: &mut Members,
        moved: impl Fn(WorkerSource) -> Option<WorkerSource>,
    ) {
        let ids: Vec<String> = members.by_id.keys().cloned().collect();
        for id in ids {
            let Some(member) = members.by_id.get_mut(&id) else { continue };
            member.leading = moved(member.leading).unwrap_or(member.leading);
            let claims = member.claims.clone().moved(&moved);
            if let Err(error) = self.settle(members, &id, claims) {
                // The remaining reports were accepted before.
                let model = members.served.name();
                tracing::error!(model, worker = id, %error, "a worker could not be updated after its source changed");
            }
        }
    }

    fn follow_source(&self, served: &ServedModel, discovery: &Discovery) -> Option<FollowedSource> {
        let (model, metrics) = (served.name(), &self.cluster.metrics);
        let SourceFollower { found, task } =
            splitrail_discovery::follow(model, discovery, metrics)?;
        let lists = Arc::new(Mutex::new(Lists { found, pending: None }));
        let name = TaskName {
            source: Some(discovery.name()),
            ..TaskName::of_model("the workers of a source", model)
        };
        let (fleet, model) = (Weak::clone(&self.own), model.to_owned());
        let source = discovery.clone();
        let mut entering = JoinSet::new();
        entering.spawn(restart_on_panic(name, move || {
            let (fleet, model, source) = (Weak::clone(&fleet), model.clone(), source.clone());
            enter(Arc::clone(&lists), move |found| {
                if let Some(fleet) = fleet.upgrade() {
                    fleet.set_discovered(&model, &source, found);
                }
            })
        }));
        Some(FollowedSource { discovery: discovery.clone(), _tasks: [task, entering] })
    }

    /// Replaces what a source reports of a model.
    fn set_discovered(&self, model: &str, discovery: &Discovery, found: &FoundWorkers) {
        let mut models = self.models();
        let Some(members) = models.get_mut(model) else { return };
        let served = Arc::clone(&members.served);
        let mut sources = WorkerSource::of(&served.config).zip(&served.config.discovery);
        let Some((origin, _)) = sources.find(|(_, other)| *other == discovery) else { return };
        let refused = self.set_members(members, origin, &found.workers);
        let source = discovery.name();
        if let Some(error) = refused.first() {
            let workers = refused.len();
            tracing::error!(model, source, workers, %error, "workers cannot be added; the first one");
        }
        served.pool.refused_workers.set(&source, &refused);
    }
}

/// Passes each list of a source to the fleet, which adds and removes workers accordingly. A list that
/// was not taken because the task panicked is passed again, unless there is a newer one.
async fn enter(lists: Arc<Mutex<Lists>>, set: impl Fn(&FoundWorkers) + Send) {
    let mut lists = lists.lock().await;
    let Lists { found, pending } = &mut *lists;
    loop {
        match pending {
            Some(_) => *pending = found.try_recv().ok().or(pending.take()),
            None => *pending = found.recv().await,
        }
        let Some(list) = &*pending else { return };
        set(list);
        *pending = None;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_list_whose_task_panics_is_passed_again_unless_there_is_a_newer_one() {
        let (send, found) = mpsc::channel(1);
        let lists = Arc::new(Mutex::new(Lists { found, pending: None }));
        let panics = Arc::clone(&lists);
        send.send(FoundWorkers::default()).await.unwrap();
        let mut entering = JoinSet::new();
        entering.spawn(enter(panics, |_| panic!("a defect")));
        assert!(entering.join_next().await.unwrap().is_err());
        let passed = std::sync::atomic::AtomicU32::new(0);
        let count = |_: &FoundWorkers| {
            passed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        };
        drop(send);
        enter(lists, count).await;
        assert_eq!(passed.into_inner(), 1);
    }
}
