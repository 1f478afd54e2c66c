//! The report of a reload's changes.

use serde_json::{Value, json};

use super::diff::Change;
use splitrail_config::Problem;
use splitrail_fleet::ServedModels;

/// The changes of a reload.
#[derive(Clone, Debug)]
pub struct ReloadReport {
    /// Every changed value.
    pub changes: Vec<Change>,
    /// Paths whose value stayed the same while its target has changed: a credential, or the files
    /// of a tokenizer.
    pub renewed: Vec<String>,
    /// Settings that are allowed but perhaps not intended.
    pub warnings: Vec<Problem>,
    /// The digest of the running configuration, as in the metrics.
    pub config_digest: u64,
}

impl ReloadReport {
    pub(super) fn new(
        before: &ServedModels,
        after: &ServedModels,
        changes: Vec<Change>,
        warnings: Vec<Problem>,
    ) -> Self {
        let mut renewed = Vec::new();
        for served in &after.models {
            let name = served.name();
            let Some(was) = before.model(name) else { continue };
            if was.client.authorization != served.client.authorization {
                renewed.push(format!("models[{name}].engine_api_key"));
            }
            if !was.client.tls.has_same_files(&served.client.tls) {
                renewed.push(format!("models[{name}].engine_tls"));
            }
            if was.prompt_files != served.prompt_files {
                renewed.push(format!("models[{name}].tokenizer"));
            }
        }
        // A new reference is already listed as a change.
        renewed.retain(|place| !changes.iter().any(|change| change.path.starts_with(place)));
        Self { changes, renewed, warnings, config_digest: after.config.digest() }
    }

    /// Adds a key whose value was read again from the same place and is another one than before.
    pub(super) fn with_renewed(mut self, key: &str) -> Self {
        if !self.changes.iter().any(|change| change.path.starts_with(key)) {
            self.renewed.push(key.to_owned());
        }
        self
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.renewed.is_empty()
    }

    /// The report as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "result": if self.is_empty() { "unchanged" } else { "changed" },
            "config_digest": format!("{:012x}", self.config_digest),
            "changes": self.changes,
            "renewed": self.renewed,
            "workers": self.workers(),
            "warnings": self.warnings.iter().map(problem_json).collect::<Vec<_>>(),
        })
    }

    /// The workers of the file that were added, removed or redefined.
    fn workers(&self) -> Value {
        let [mut added, mut removed, mut changed] = [const { Vec::new() }; 3];
        for change in &self.changes {
            let Some((model, rest)) = change.path.split_once("].workers[") else {
                let Some(model) = change.path.strip_prefix("models[") else { continue };
                let Some(model) = model.strip_suffix(']') else { continue };
                // A model that is added or removed has all its workers.
                for (value, to) in [(&change.old, &mut removed), (&change.new, &mut added)] {
                    let workers = value["workers"].as_object().into_iter().flatten();
                    to.extend(
                        workers.map(|(_, worker)| json!({"model": model, "id": worker["id"]})),
                    );
                }
                continue;
            };
            let model = model.trim_start_matches("models[");
            let id = rest.split_once(']').map_or(rest, |(id, _)| id);
            let to = match (rest.ends_with(']'), change.old.is_null(), change.new.is_null()) {
                (true, true, _) => &mut added,
                (true, _, true) => &mut removed,
                _ => &mut changed,
            };
            let worker = json!({"model": model, "id": id});
            if !to.contains(&worker) {
                to.push(worker);
            }
        }
        json!({"added": added, "removed": removed, "changed": changed})
    }
}

/// A problem as JSON.
pub fn problem_json(problem: &Problem) -> Value {
    let Problem { file, line, column, message, hint } = problem;
    json!({"file": file, "line": line, "column": column, "message": message, "hint": hint})
}
