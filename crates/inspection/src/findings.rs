//! From facts and configuration to findings. Pure functions.

use splitrail_config::model::Model;

use crate::facts::{ModelFacts, SourceState, WorkerFacts};
use crate::finding::{Finding, FindingKind};
use list::Findings;

mod blocks;
mod hand_off;
mod identity;
mod list;
mod pool;
mod reach;
mod shim;
#[cfg(test)]
mod tests;
mod tokens;

/// All findings about one model: those about its sources, about each worker, and about its workers
/// together.
#[must_use]
pub fn findings(model: &Model, facts: &ModelFacts) -> Vec<Finding> {
    let mut found = Findings::about(model);
    for source in &facts.sources {
        let name = &source.name;
        match &source.state {
            SourceState::Found(0) => {
                found.add(FindingKind::SourceEmpty, format!("{name} found no worker"))
            }
            SourceState::Found(_) => {}
            SourceState::Failed(cause) => {
                found.add(FindingKind::SourceFails, format!("{name}: {cause}"))
            }
            SourceState::NotAsked => {
                let what = format!("the workers of {name} are known to running routers only");
                found.add(FindingKind::SourceNotAsked, what);
            }
        }
    }
    for worker in &facts.workers {
        found.worker = Some(&worker.config.id);
        of_worker(&mut found, worker);
    }
    found.worker = None;
    pool::check(&mut found, &facts.workers);
    found.list
}

fn of_worker(found: &mut Findings<'_>, worker: &WorkerFacts) {
    reach::check(found, worker);
    shim::check(found, worker);
    if worker.is_reached() {
        identity::check(found, worker);
        blocks::check(found, worker);
        tokens::check(found, worker);
        hand_off::check(found, worker);
    }
}
