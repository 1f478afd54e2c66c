//! Optional parts of the router, and the check that a configuration needs only parts that the build
//! has.

use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

/// The optional parts of a build. Each is a cargo feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Discovery of workers from pods (`discovery: [{ kind: kubernetes }]`).
    pub kubernetes: bool,
    /// Export of traces (`tracing.otlp`).
    pub otlp: bool,
    /// Limits that routers share over a broker (`quotas: { kind: nats }`).
    pub nats: bool,
}

impl Parts {
    /// A build with all parts.
    pub const ALL: Self = Self { kubernetes: true, nats: true, otlp: true };

    /// Reports settings that need a part which the build does not have.
    pub(crate) fn check(self, root: &Node, report: &mut ProblemReport) {
        let models = root.get("models").map(Node::items).unwrap_or_default();
        for (model, node) in models.iter().enumerate() {
            let sources = node.get("discovery").map(Node::items).unwrap_or_default();
            for (source, node) in sources.iter().enumerate() {
                let key = format!("models[{model}].discovery[{source}].kind");
                lacking(self.kubernetes, "kubernetes", &key, node.get("kind"), report);
            }
        }
        let quotas = root.get("quotas").and_then(|quotas| quotas.get("kind"));
        lacking(self.nats, "nats", "quotas.kind", quotas, report);
        let otlp = root.get("tracing").and_then(|tracing| tracing.get("otlp"));
        if let Some(node) = otlp.filter(|node| !self.otlp && node.value != Value::Null) {
            let hint = "build with `--features otlp` or with release/build";
            report.error(node.at, "`tracing.otlp` is not part of this build".to_owned(), hint);
        }
    }
}

fn lacking(has: bool, part: &str, key: &str, kind: Option<&Node>, report: &mut ProblemReport) {
    let Some(node) = kind else { return };
    if !has && node.text() == Some(part) {
        let message = format!("`{key}: {part}` is not part of this build");
        let hint = format!("build with `--features {part}` or with release/build");
        report.error(node.at, message, &hint);
    }
}
