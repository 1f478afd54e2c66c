//! Which adapters the engines of a model have loaded, and from where.
//!
//! A namespace contains an adapter's name, but an engine can load other weights under the same name.
//! vLLM hashes blocks by name and path; its list of models has the path, and its KV events have the
//! number of the load. When an engine lists another path, the blocks that it computed before are dropped
//! from the index. KV moves between two workers only if both have loaded the adapter from the same path,
//! as far as that is known.

use std::collections::BTreeMap;
use std::sync::Arc;

use splitrail_engine::identity::EngineModel;
use splitrail_policy::{Leg, group_tag};

use crate::engine_facts::{AdapterFacts, Adapters};
use crate::{Pool, ServedModel, Worker};

impl Worker {
    /// Whether the engine has loaded an adapter; `None` before its list was read.
    pub fn has_adapter(&self, name: &str) -> Option<bool> {
        self.engine.facts.adapters().get(name)?.is_listed
    }

    /// The tag of the path from which the engine has loaded an adapter; `None` if that is not known.
    fn adapter_root(&self, name: &str) -> Option<u64> {
        let known = self.engine.facts.adapters();
        known
            .get(name)
            .filter(|adapter| adapter.is_listed == Some(true))
            .map(|adapter| adapter.root)
    }

    /// Whether one worker may use KV that the other has computed with an adapter (`None`: with the model
    /// itself): both have loaded it from the same path, as far as they tell.
    pub fn agrees_on(&self, adapter: Option<&str>, other: &Self) -> bool {
        let root = |worker: &Self| worker.adapter_root(adapter?).filter(|root| *root > 0);
        match (root(self), root(other)) {
            (Some(own), Some(others)) => own == others,
            _ => true,
        }
    }
}

impl ServedModel {
    /// The adapter that a body asks for, by its member `model` as JSON; `None` if it asks for the model
    /// itself.
    pub fn adapter_of(&self, model: Option<&str>) -> Option<String> {
        if self.config.adapters.is_empty() {
            return None;
        }
        let name: String = serde_json::from_str(model?).ok()?;
        self.config.adapters.contains(&name).then_some(name)
    }
}

impl Pool {
    /// Whether a worker in service that can serve a request alone has an adapter, or may have it. `true`
    /// if no worker is in service.
    pub fn may_have_adapter(&self, name: &str) -> bool {
        let roster = self.roster();
        let mut alone = roster.iter().filter(serves_alone).peekable();
        alone.peek().is_none() || alone.any(|worker| worker.has_adapter(name) != Some(false))
    }

    /// One of the workers that have loaded an adapter from the path from which most have, of those that
    /// can serve a request alone.
    pub fn typical_holder(&self, name: &str) -> Option<Arc<Worker>> {
        let roster = self.roster();
        let mut holders: BTreeMap<u64, (usize, &Arc<Worker>)> = BTreeMap::new();
        for worker in roster.iter().filter(serves_alone) {
            if let Some(root) = worker.adapter_root(name) {
                holders.entry(root).or_insert((0, worker)).0 += 1;
            }
        }
        let most = holders.into_iter().max_by_key(|(root, (count, _))| (*count, *root));
        most.map(|(_, (_, worker))| Arc::clone(worker))
    }

    /// The numbers of the latest loads of adapters in a worker's KV events.
    pub(crate) fn adapter_loads(&self, worker: &Worker, names: &[String]) -> Vec<u64> {
        let index = self.index();
        names.iter().map(|name| index.adapter_load(worker.index.0, name)).collect()
    }

    /// Records which of the adapters `names` an engine lists. `loads` are their [`Pool::adapter_loads`]
    /// before the engine was asked. If one was loaded from another path since the last time, its blocks
    /// are dropped, but for those of a load that has begun since.
    pub(crate) fn learn_adapters(
        &self,
        worker: &Worker,
        names: &[String],
        loads: &[u64],
        models: &[EngineModel],
    ) {
        let before = worker.engine.facts.adapters();
        let mut now = Adapters::new();
        for (name, load) in names.iter().zip(loads) {
            let known = before.get(name);
            let listed = models.iter().find(|model| model.name == *name);
            let root = match listed {
                Some(model) => model.root.as_deref().map_or(0, group_tag),
                None => known.map_or(0, |known| known.root),
            };
            let is_listed = listed.is_some();
            let mut load = known.map_or(0, |known| known.load).max(*load);
            let (model, id) = (worker.model(), worker.id());
            if known
                .and_then(|known| known.is_listed)
                .is_some_and(|was_listed| was_listed != is_listed)
            {
                let what = if is_listed { "loaded" } else { "unloaded" };
                tracing::info!(
                    model,
                    worker = id,
                    adapter = name,
                    "the engine has {what} an adapter"
                );
            }
            if let Some(known) = known.filter(|known| known.root > 0 && known.root != root) {
                let blocks;
                (blocks, load) = self.forget_adapter(worker, name, known.load);
                self.speculative_index.forget(worker.index);
                worker.engine.facts.count_adapter_change();
                tracing::info!(
                    model,
                    worker = id,
                    adapter = name,
                    blocks,
                    "the engine has loaded an adapter from another path: its earlier blocks are \
                     dropped from the index"
                );
            }
            now.insert(name.clone(), AdapterFacts { root, is_listed: Some(is_listed), load });
        }
        worker.engine.facts.set_adapters(now);
    }

    /// Drops a worker's blocks of an adapter, except those of its latest load if that is later than one
    /// that was `known` to be of the path before. Returns the number of copies, and the number of the
    /// load whose blocks stay; 0 if none do.
    fn forget_adapter(&self, worker: &Worker, name: &str, known: u64) -> (usize, u64) {
        let mut index = self.index();
        let latest = index.adapter_load(worker.index.0, name);
        let stays = if known > 0 && latest > known { latest } else { 0 };
        let through = if stays > 0 { latest - 1 } else { latest };
        (index.forget_adapter(worker.index.0, name, through), stays)
    }
}

fn serves_alone(worker: &&Arc<Worker>) -> bool {
    worker.state().takes_work() && worker.serves(Leg::Aggregated)
}

#[cfg(test)]
mod tests;
