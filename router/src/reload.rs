//! Reloads the configuration while the router runs.
//!
//! The file is read and checked completely, and everything that can fail is built; only then is
//! the new configuration applied, all at once. Until then nothing has changed. Reloads run one at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use splitrail_settings::logging::{self, warn_of};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

pub mod diff;
mod leftovers;
mod prepare;
mod report;

use leftovers::Leftovers;
pub use prepare::Refused;
pub use report::{Report, problem_json};

use crate::core::Core;
use splitrail_fleet::Fleet;

/// Reloads that wait for the one that runs; beyond them, one more would find the same file.
const WAITING_MAX: usize = 16;

/// Lines of the log that one reload may take.
const LOGGED_MAX: usize = 50;

/// Who wants to know how a reload ended.
type Asker = oneshot::Sender<Result<Report, Refused>>;

/// Asks for reloads. Cheap to clone.
#[derive(Clone)]
pub struct Reload {
    asks: mpsc::Sender<Option<Asker>>,
}

impl Reload {
    /// Starts the task that reloads `file`; dropping the set ends it. Without a file, every
    /// reload is refused.
    pub fn start(core: Arc<Core>, fleet: Arc<Fleet>, file: Option<PathBuf>) -> (Self, JoinSet<()>) {
        let (asks, mut waiting) = mpsc::channel::<Option<Asker>>(WAITING_MAX);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut leftovers = Leftovers::default();
            loop {
                let asked = tokio::select! {
                    asked = waiting.recv() => asked,
                    () = leftovers.clear() => continue,
                };
                let Some(asker) = asked else { return };
                let before = core.serving();
                let outcome = once(&core, &fleet, file.as_deref()).await;
                leftovers.take(&before, &core.serving());
                say(&core, &outcome);
                if let Some(asker) = asker {
                    // Who has left is not told; what was done stays.
                    let _left = asker.send(outcome);
                }
            }
        });
        (Self { asks }, task)
    }

    /// Reloads, and says how that ended. Once asked for it is done, even if the caller leaves.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub async fn now(&self) -> Result<Report, Refused> {
        let (asker, outcome) = oneshot::channel();
        if self.asks.try_send(Some(asker)).is_err() {
            return Err(Refused::Busy);
        }
        outcome.await.unwrap_or(Err(Refused::Draining))
    }

    /// Reloads some time soon, and says in the log how that ended.
    pub fn soon(&self) {
        if self.asks.try_send(None).is_err() {
            // Those that wait will read the file as it is now.
            tracing::warn!("as many reloads as may are waiting already");
        }
    }
}

async fn once(
    core: &Arc<Core>,
    fleet: &Arc<Fleet>,
    file: Option<&Path>,
) -> Result<Report, Refused> {
    let file = file.ok_or(Refused::NoFile)?.to_owned();
    if core.is_draining() {
        return Err(Refused::Draining);
    }
    let before = core.serving();
    let (core, fleet) = (Arc::clone(core), Arc::clone(fleet));
    // Tokenizers take a while, files may, and to take workers out of an index does.
    let reloading = tokio::task::spawn_blocking(move || {
        let (serving, report) = prepare::prepare(&file, &core, &before)?;
        if core.is_draining() {
            return Err(Refused::Draining);
        }
        let decisions_kept = serving.limits.decisions_kept;
        fleet.serve(Arc::new(serving)).map_err(Refused::Fleet)?;
        core.decisions.keep(decisions_kept);
        core.metrics.set_config(report.config_digest);
        Ok(report)
    });
    reloading.await.unwrap_or_else(|error| Err(Refused::Defect(error.to_string())))
}

fn say(core: &Core, outcome: &Result<Report, Refused>) {
    let result = match outcome {
        Ok(report) if report.is_empty() => "unchanged",
        Ok(_) => "changed",
        Err(_) => "refused",
    };
    core.metrics.reloads.with_label_values(&[result]).inc();
    match outcome {
        Ok(report) => {
            warn_of(&report.warnings[..report.warnings.len().min(LOGGED_MAX)]);
            for change in report.changes.iter().take(LOGGED_MAX) {
                tracing::info!(%change, "configuration");
            }
            for renewed in report.renewed.iter().take(LOGGED_MAX) {
                tracing::info!(renewed, "configuration");
            }
            let digest = format!("{:012x}", report.config_digest);
            tracing::info!(changes = report.changes.len(), digest, "configuration reloaded");
        }
        Err(refused) => {
            let problems = refused.problems();
            logging::report(&problems[..problems.len().min(LOGGED_MAX)]);
            tracing::error!(%refused, "reload refused: the running configuration stays");
        }
    }
}
