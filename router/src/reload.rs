//! Reloads the configuration while the router runs.
//!
//! The file is read and checked completely, and everything that can fail is built; only then is the
//! new configuration applied, all at once. Until then nothing has changed. Reloads run one at a
//! time.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use splitrail_settings::logging::{self, warn_of};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

pub mod diff;
mod leftovers;
mod prepare;
mod report;
mod watched_file;

use leftovers::Leftovers;
use prepare::PreparedReload;
pub use prepare::ReloadError;
pub use report::{ReloadReport, problem_json};
pub use watched_file::WatchedFile;

use crate::core::Core;
use splitrail_fleet::{Fleet, ServedModels};

/// Maximum number of reloads that wait for the running one; a further one would find the same file.
const WAITING_MAX: usize = 16;

/// Maximum number of log lines of one reload.
const LOGGED_MAX: usize = 50;

/// Receives the result of a reload.
type ResultSender = oneshot::Sender<Result<ReloadReport, ReloadError>>;

/// Requests reloads. Cheap to clone.
#[derive(Clone)]
pub struct Reload {
    requests: mpsc::Sender<Option<ResultSender>>,
}

impl Reload {
    /// Starts the task that reloads `file`; dropping the set ends it. Without a file, every reload
    /// is refused.
    pub fn start(core: Arc<Core>, fleet: Arc<Fleet>, file: Option<PathBuf>) -> (Self, JoinSet<()>) {
        let (requests, mut waiting) = mpsc::channel::<Option<ResultSender>>(WAITING_MAX);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut leftovers = Leftovers::default();
            loop {
                let asked = tokio::select! {
                    asked = waiting.recv() => asked,
                    () = leftovers.clear() => continue,
                };
                let Some(result_sender) = asked else { return };
                let before = core.serving();
                let outcome = once(&core, &fleet, file.as_deref()).await;
                leftovers.take(&before, &core.serving());
                log_outcome(&core, &outcome);
                if let Some(result_sender) = result_sender {
                    // The caller may have left; the reload remains in effect.
                    let _left = result_sender.send(outcome);
                }
            }
        });
        (Self { requests }, task)
    }

    /// Reloads and returns the result. A requested reload is carried out even if the caller leaves.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub async fn now(&self) -> Result<ReloadReport, ReloadError> {
        let (result_sender, outcome) = oneshot::channel();
        if self.requests.try_send(Some(result_sender)).is_err() {
            return Err(ReloadError::Busy);
        }
        outcome.await.unwrap_or(Err(ReloadError::Draining))
    }

    /// Requests a reload without waiting; its result is logged.
    pub fn soon(&self) {
        if self.requests.try_send(None).is_err() {
            // The waiting reloads will read the file as it is now.
            tracing::warn!("too many reloads are waiting; they will read the current file");
        }
    }
}

async fn once(
    core: &Arc<Core>,
    fleet: &Arc<Fleet>,
    file: Option<&Path>,
) -> Result<ReloadReport, ReloadError> {
    let file = file.ok_or(ReloadError::NoFile)?.to_owned();
    if core.is_draining() {
        return Err(ReloadError::Draining);
    }
    let before = core.serving();
    let (core, fleet) = (Arc::clone(core), Arc::clone(fleet));
    // Loading tokenizers, reading files and removing workers from an index may take long.
    let reloading = tokio::task::spawn_blocking(move || {
        let outcome = apply(&core, &fleet, &file, &before);
        // The limits of what is in use now. Tenants of a refused configuration hold shares of limits
        // already, which other replicas need.
        let access = core.access.load();
        access.apply_limits();
        access.forget_other_issuers(&core.metrics);
        outcome
    });
    reloading.await.unwrap_or_else(|error| Err(ReloadError::Defect(error.to_string())))
}

/// Reads the file and applies it. May wait for a disk and for the index.
fn apply(
    core: &Core,
    fleet: &Fleet,
    file: &Path,
    before: &ServedModels,
) -> Result<ReloadReport, ReloadError> {
    let PreparedReload { serving, access, report } = prepare::prepare(file, core, before)?;
    if core.is_draining() {
        return Err(ReloadError::Draining);
    }
    let decisions_kept = serving.limits.decisions_kept;
    fleet.serve(Arc::new(serving)).map_err(ReloadError::Fleet)?;
    access.declare(&core.metrics);
    core.access.store(Arc::new(access));
    core.decisions.keep(decisions_kept);
    core.metrics.set_config(report.config_digest);
    Ok(report)
}

fn log_outcome(core: &Core, outcome: &Result<ReloadReport, ReloadError>) {
    let result = match outcome {
        Ok(report) if report.is_empty() => "unchanged",
        Ok(_) => "changed",
        Err(_) => "refused",
    };
    if outcome.as_ref().err().is_none_or(ReloadError::is_about_the_file) {
        core.metrics.reloads.with_label_values(&[result]).inc();
    }
    core.logs.audit.reload(result, outcome.as_ref().map_or(0, |report| report.changes.len()));
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
            if refused.is_about_the_file() {
                core.metrics.set_reload_refused();
            }
            let problems = refused.problems();
            logging::report(&problems[..problems.len().min(LOGGED_MAX)]);
            tracing::error!(%refused, "reload refused: the running configuration stays");
        }
    }
}
