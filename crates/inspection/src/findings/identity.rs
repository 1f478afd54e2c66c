//! What the engine is: its health, models, version, clock and ranks.

use splitrail_engine::identity::EngineVersion;

use super::list::Findings;
use crate::facts::{BootstrapFact, WorkerFacts};
use crate::finding::FindingKind;

/// Difference of two clocks, in seconds, from which it is reported. The resolution of `date` is a
/// second, and a reply may take some more.
const CLOCK_MAX_S: i64 = 5;
/// Maximum number of names that a finding lists.
const NAMES_MAX: usize = 5;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let engine = &worker.engine;
    let model = found.model;
    if let Some(status) = engine.health.filter(|status| *status != 200) {
        found.add(
            FindingKind::Unhealthy,
            format!("`{}` returns status {status}", engine.kind.paths().liveness),
        );
    }
    let owner = engine.models.iter().find_map(|model| model.owner);
    if let Some(other) = owner.filter(|owner| *owner != engine.kind) {
        let (other, asked) = (other.name(), engine.kind.name());
        let what = format!("the engine lists its models as {other}'s, and is asked as {asked}");
        found.add(FindingKind::OtherEngine, what);
    }
    if engine.model(&model.name).is_none() {
        let names: Vec<_> = engine.models.iter().map(|model| format!("`{}`", model.name)).collect();
        let serves = match names.len() {
            0 => "no model".to_owned(),
            count if count > NAMES_MAX => {
                format!("{} and {} more", names[..NAMES_MAX].join(", "), count - NAMES_MAX)
            }
            _ => names.join(", "),
        };
        let what = format!("the engine serves {serves}, not `{}`", model.name);
        found.add(FindingKind::WrongModel, what);
    }
    for adapter in model.adapters.iter().filter(|name| engine.model(name).is_none()) {
        found.add(
            FindingKind::AdapterMissing,
            format!("the engine does not serve the adapter `{adapter}`"),
        );
    }
    let version = engine.version.as_deref();
    let parsed = version.and_then(EngineVersion::parse);
    if let (Some(version), Some(oldest)) = (parsed, engine.kind.oldest_version())
        && version < oldest
    {
        let what = format!(
            "the engine's version {version} is older than {oldest}, the oldest one whose KV events \
             and hand-offs are known"
        );
        found.add(FindingKind::TooOld, what);
    }
    if let Some(ahead_s) = worker.clock_ahead_s.filter(|ahead_s| ahead_s.abs() > CLOCK_MAX_S) {
        let direction = if ahead_s > 0 { "ahead of" } else { "behind" };
        let what = format!(
            "the clock of the engine's host is {} s {direction} this host's",
            ahead_s.unsigned_abs()
        );
        found.add(FindingKind::ClockOff, what);
    }
    if let (Some(ours), Some(engines)) = (worker.config.data_parallel_ranks, engine.ranks)
        && u32::from(ours) != engines
    {
        let what =
            format!("the engine has {engines} data-parallel ranks, the configuration {ours}");
        found.add(FindingKind::RanksDiffer, what);
    }
    if let BootstrapFact::Fails { url, cause } = &worker.bootstrap {
        found.add(FindingKind::BootstrapFails, format!("the bootstrap server {url}: {cause}"));
    }
}
