//! The differences between two configurations, for operators.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use splitrail_config::Config;

/// A changed value. Secrets are references in a configuration, never values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The path of the value; models and workers are identified by name, as in
    /// `models[sim].workers[w0].url`.
    pub path: String,
    /// The old value; null if there was none.
    pub old: Value,
    /// The new value; null if there is none.
    pub new: Value,
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, old, new } = self;
        write!(out, "{path}: {old} -> {new}")
    }
}

/// All differences, sorted by path.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let mut found = Vec::new();
    compare(String::new(), &by_name(old), &by_name(new), &mut found);
    found
}

/// The configuration with its models and workers by name: their order in the file does not matter.
fn by_name(config: &Config) -> Value {
    let mut whole = serde_json::to_value(config).unwrap_or_default();
    let models = whole["models"].take();
    let models = models.as_array().into_iter().flatten().cloned().map(|mut model| {
        let workers = model["workers"].take();
        let workers = workers.as_array().into_iter().flatten().cloned();
        model["workers"] = keyed(workers, "id");
        model
    });
    whole["models"] = keyed(models, "name");
    whole
}

fn keyed(items: impl Iterator<Item = Value>, key: &str) -> Value {
    let entry = |item: Value| (format!("[{}]", item[key].as_str().unwrap_or_default()), item);
    Value::Object(items.map(entry).collect::<Map<_, _>>())
}

fn compare(path: String, old: &Value, new: &Value, found: &mut Vec<Change>) {
    match (old, new) {
        (old, new) if old == new => {}
        (Value::Object(before), Value::Object(after)) => {
            let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
            for key in keys {
                let dot = if path.is_empty() || key.starts_with('[') { "" } else { "." };
                let [old, new] = [before, after].map(|map| map.get(key).unwrap_or(&Value::Null));
                compare(format!("{path}{dot}{key}"), old, new, found);
            }
        }
        _ => found.push(Change { path, old: old.clone(), new: new.clone() }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(text: &str) -> Config {
        splitrail_config::parse("c.yaml", text, Path::new("")).unwrap().config
    }

    const BEFORE: &str = "
models:
  - name: a
    tokenizer: { kind: none }
    flow: aggregated
    workers: [ { id: w0, role: both, url: 'http://a:1' }, { id: w1, role: both, url: 'http://a:2' } ]
  - { name: b, tokenizer: { kind: none }, flow: aggregated, workers: [ { id: w, role: both, url: 'http://b:1' } ] }
";

    #[test]
    fn differences_are_named_by_model_and_worker() {
        let after = BEFORE
            .replace("flow: aggregated\n", "flow: aggregated\n    policy: { kind: round_robin }\n")
            .replace("http://a:2", "http://a:3")
            .replace("id: w0", "id: w9");
        let told: Vec<_> =
            changes(&config(BEFORE), &config(&after)).iter().map(Change::to_string).collect();
        assert_eq!(told[0], "models[a].policy.kind: \"predicted_ttft\" -> \"round_robin\"");
        assert!(told[1].starts_with("models[a].workers[w0]: {"), "{told:#?}");
        assert!(told[1].ends_with("-> null"), "{told:#?}");
        assert_eq!(told[2], "models[a].workers[w1].url: \"http://a:2\" -> \"http://a:3\"");
        assert!(told[3].starts_with("models[a].workers[w9]: null -> {"), "{told:#?}");
        assert_eq!(told.len(), 4);
    }

    #[test]
    fn another_order_of_models_and_workers_is_not_a_difference() {
        let (first, second) = BEFORE.split_at(BEFORE.find("  - { name: b").unwrap());
        let (head, first) = first.split_at(first.find("  - name: a").unwrap());
        let turned = format!("{head}{second}{first}");
        assert_eq!(changes(&config(BEFORE), &config(&turned)), []);
        assert_eq!(changes(&config(BEFORE), &config(BEFORE)), []);
    }
}
