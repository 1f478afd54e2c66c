//! A worker that an operator adds while the router runs. It is checked by the same rules as workers
//! in the configuration file, with the same messages.

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::file_profiles::ADDITION_PROFILE;
use super::model::{Connector, Flow, WorkerConfig};
use super::rules;
use splitrail_settings::problem::{Place, Problem, ProblemReport, Problems};
use splitrail_settings::{file, tree};

/// The file name in problems: the worker is in a request's body.
const NAME: &str = "body";

/// A worker that joins a model.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Addition {
    /// The model's name; may be omitted if there is only one model.
    #[serde(default)]
    pub model: Option<String>,
    /// The worker.
    pub worker: WorkerConfig,
    /// What is allowed but perhaps not intended.
    #[serde(skip)]
    pub warnings: Vec<Problem>,
}

impl Addition {
    /// Reads a worker from JSON. `joins` returns flow and connector of the model with the given
    /// name, or, without a name, of the only model; `None` if there is no such model.
    ///
    /// # Errors
    /// All mistakes, each with its position.
    pub fn parse(
        text: &str,
        joins: impl FnOnce(Option<&str>) -> Option<(Flow, Connector)>,
    ) -> Result<Self, Problems> {
        if let Err(error) = serde_json::from_str::<IgnoredAny>(text) {
            let mut report = ProblemReport::new(NAME);
            let place = Place { line: error.line().max(1), column: error.column().max(1) };
            let hint = "send `{\"model\": NAME, \"worker\": {\"id\": ..., \"role\": ..., \
                        \"url\": ...}}`";
            report.error(place, "this is not JSON".to_owned(), hint);
            return Err(report.into_problems());
        }
        let rules = |root: &mut tree::Node, report: &mut ProblemReport| {
            if let Some(worker) = root.get("worker") {
                let model = root.get("model").and_then(tree::Node::text);
                rules::check_worker(worker, "worker", joins(model), report);
            }
        };
        // JSON is a subset of YAML, so the YAML parser can report positions.
        let schema = schemars::schema_for!(Self).to_value();
        let checked = file::parse::<Self>(NAME, text, &schema, &ADDITION_PROFILE, rules)?;
        Ok(Self { warnings: checked.warnings, ..checked.value })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn problems(text: &str, connector: Option<Connector>) -> Vec<String> {
        let problems =
            Addition::parse(text, |_| Some((Flow::PrefillFirst, connector?))).unwrap_err();
        problems
            .as_slice()
            .iter()
            .map(|p| format!("{}:{} {}", p.line, p.column, p.message))
            .collect()
    }

    #[test]
    fn a_worker_is_read_as_in_the_file() {
        let text = r#"{"model": "m", "worker": {"id": "w", "role": "both", "url": "http://a:1",
            "kv_events": "tcp://a:2"}}"#;
        let read = Addition::parse(text, |model| {
            assert_eq!(model, Some("m"));
            Some((Flow::PrefillFirst, Connector::Nixl))
        });
        let Addition { model, worker, warnings } = read.unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!((model.as_deref(), worker.url.as_str()), (Some("m"), "http://a:1"));
    }

    #[test]
    fn every_mistake_is_reported_with_its_place() {
        let text = "{\"modl\": \"m\",\n \"worker\": {\"id\": \"w w\", \"url\": \"https://a\",\n  \"kv_replay\": \"tcp://a:2\"}}";
        let told = problems(text, None);
        assert_eq!(told.len(), 5, "{told:#?}");
        assert!(told[0].starts_with("1:2 ") && told[0].contains("unknown key `modl`"), "{told:#?}");
        assert!(told.iter().any(|p| p.starts_with("2:") && p.contains("has no `role`")));
        assert!(told.iter().any(|p| p.starts_with("3:3 ") || p.contains("kv_replay")));
    }

    #[test]
    fn an_addition_that_its_connector_does_not_support_is_refused() {
        let text = r#"{"worker": {"id": "w", "role": "both", "url": "http://a:1"}}"#;
        assert!(problems(text, Some(Connector::Sglang))[0].contains("worker.role: both"));
        let text = r#"{"worker": {"id": "w", "role": "prefill", "url": "http://a:1", "bootstrap": "http://a:2"}}"#;
        assert!(problems(text, Some(Connector::Nixl))[0].contains("of no use"));
    }

    #[test]
    fn yaml_is_not_json() {
        assert!(problems("worker: {id: w}", None)[0].starts_with("1:1 this is not JSON"));
    }
}
