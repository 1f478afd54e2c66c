//! Builds every part of a reload that can fail, before anything is changed.

use std::path::Path;

use super::diff::changes;
use super::report::ReloadReport;
use crate::assemble::reassemble;
use crate::core::Core;
use splitrail_access::Access;
use splitrail_config::{Problem, Problems, Source};
use splitrail_fleet::ServedModels;
use splitrail_fleet::membership::ClaimError;
use splitrail_fleet::models::ModelError;

/// Why a reload has changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The file has mistakes, or changes keys that cannot change while the router runs.
    #[error("the configuration has {count} problem(s)")]
    Problems {
        /// The first problems, sorted by place.
        listed: Vec<Problem>,
        /// Number of problems.
        count: usize,
    },
    /// A worker cannot be added.
    #[error("{0}")]
    Fleet(ClaimError),
    /// The router was not started from a file.
    #[error("the router was not started from a file: there is nothing to read again")]
    NoFile,
    /// The router drains.
    #[error("the router is draining")]
    Draining,
    /// The maximum number of reloads is waiting.
    #[error("other reloads are waiting already")]
    Busy,
    /// A defect of the router.
    #[error("a defect: {0}")]
    Defect(String),
}

impl ReloadError {
    /// The problems of the file, if they are the reason.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Problems { listed, .. } => listed,
            _ => &[],
        }
    }

    /// Whether the file, or what it names, is why nothing has changed.
    pub(super) fn is_about_the_file(&self) -> bool {
        !matches!(self, Self::NoFile | Self::Draining | Self::Busy)
    }

    fn listing(mut listed: Vec<Problem>) -> Self {
        listed.sort_by_key(|problem| (problem.line, problem.column));
        Self::Problems { count: listed.len(), listed }
    }
}

impl From<Problems> for ReloadError {
    fn from(problems: Problems) -> Self {
        Self::Problems { listed: problems.as_slice().to_vec(), count: problems.count() }
    }
}

/// Keys that are used only at the start, with everything below them.
const FIXED: [&[&str]; 13] = [
    &["listen"],
    &["hash_seed"],
    &["fleet"],
    &["rng_seed"],
    &["ledger"],
    &["record"],
    &["audit"],
    &["access_log", "path"],
    &["access_log", "rotate"],
    &["tracing"],
    &["quotas"],
    &["limits", "body_size_max"],
    &["limits", "in_flight_max"],
];

/// What a reload puts in place of the current state.
pub(super) struct PreparedReload {
    pub(super) serving: ServedModels,
    pub(super) access: Access,
    pub(super) report: ReloadReport,
}

/// Builds what a file configures, in place of the current state, which is not changed.
pub(super) fn prepare(
    file: &Path,
    core: &Core,
    before: &ServedModels,
) -> Result<PreparedReload, ReloadError> {
    let loaded = splitrail_config::load_again(file, crate::PARTS, &before.config)?;
    let changes = changes(&before.config, &loaded.config);
    let fixed = changes.iter().filter_map(|change| {
        let keys: Vec<&str> = change.path.split('.').collect();
        FIXED.iter().find(|fixed| keys.starts_with(fixed))?;
        let message = format!("`{}` cannot change while the router runs", change.path);
        let hint = "restart the router for it, or put back what it was";
        Some(loaded.source().problem(&keys, message, hint))
    });
    let fixed: Vec<_> = fixed.collect();
    if !fixed.is_empty() {
        return Err(ReloadError::listing(fixed));
    }
    let source = loaded.source().clone();
    let places: Vec<String> = loaded.config.models.iter().map(|model| model.name.clone()).collect();
    let access_before = core.access.load_full();
    let access =
        Access::new(&loaded.config, &core.metrics, Some(&access_before)).map_err(|error| {
            let hint = "`splitrail check` says the same";
            ReloadError::listing(vec![source.problem(&["auth"], error.to_string(), hint)])
        })?;
    let serving = reassemble(loaded.config, core, before);
    let serving = serving.map_err(|error| located(&error, &source, &places))?;
    let report = ReloadReport::new(before, &serving, changes, loaded.warnings);
    let report = match access.salts_as(&access_before) {
        true => report,
        false => report.with_renewed("cache_salt_key"),
    };
    Ok(PreparedReload { serving, access, report })
}

/// The place in the file of the resource that is not available.
fn located(error: &ModelError, source: &Source, models: &[String]) -> ReloadError {
    const READABLE: &str = "the router must be able to read it";
    const CHECK: &str = "`splitrail check` says the same";
    let (model, keys, hint) = match error {
        ModelError::Secret { model, .. } => (model, vec!["engine_api_key"], READABLE),
        ModelError::Tls { model, source } => (model, vec!["engine_tls", source.key], CHECK),
        ModelError::Tokenizer { model, .. } => (model, vec!["tokenizer", "path"], CHECK),
        ModelError::ChatTemplate { model, .. } => {
            (model, vec!["tokenizer", "chat_template"], READABLE)
        }
    };
    let place = models.iter().position(|name| name == model).unwrap_or_default().to_string();
    let path = [&["models", place.as_str()], &keys[..]].concat();
    ReloadError::listing(vec![source.problem(&path, error.to_string(), hint)])
}
