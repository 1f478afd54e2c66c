//! Rules about peer fetches: what they need.

use crate::model::{Connector, KvLoadFailurePolicy, PeerFetch, Policy, TokenizerConfig};
use crate::value::typed_or;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Reports peer fetches that cannot happen.
pub(super) fn check(model: &Node, path: &str, report: &mut ProblemReport) {
    let Some(fetch) = typed_or(model, "peer_fetch", PeerFetch::default()) else { return };
    if matches!(fetch, PeerFetch::Auto | PeerFetch::Off) {
        return;
    }
    let at = model.get("peer_fetch").unwrap_or(model).at;
    let mut error = |why: &str, hint: &str| {
        report.error(at, format!("`{path}.peer_fetch` {why}"), hint);
    };
    for (why, hint) in missing(model) {
        error(why, hint);
    }
    let unknown = KvLoadFailurePolicy::Recompute;
    let on_failure = typed_or(model, "kv_load_failure_policy", unknown);
    if fetch == PeerFetch::OneShot && on_failure == Some(unknown) {
        error(
            "is `one_shot`, which needs `kv_load_failure_policy: fail`",
            "with `recompute`, a prefill leg whose read fails never ends: write down what the \
             prefill engines were started with, or use `two_step`",
        );
    }
}

/// What a model lacks for peer fetches, each with a hint.
pub(super) fn missing(model: &Node) -> impl Iterator<Item = (&'static str, &'static str)> {
    let connector = typed_or(model, "connector", Connector::default());
    let tokenizer = typed_or(model, "tokenizer", TokenizerConfig::None {});
    let policy = typed_or(model, "policy", Policy::default());
    [
        (
            connector.is_some_and(|connector| !connector.is_pulled()),
            ("needs `connector: nixl`", "only NIXL's hand-offs can be taken by any worker"),
        ),
        (
            tokenizer == Some(TokenizerConfig::None {}),
            ("needs a tokenizer", "what is fetched is named by its token ids: add `tokenizer`"),
        ),
        (
            policy.is_some_and(|policy| !matches!(policy, Policy::PredictedTtft { .. })),
            (
                "needs `policy: { kind: predicted_ttft }`",
                "only `predicted_ttft` can decide whether a fetch pays",
            ),
        ),
    ]
    .into_iter()
    .filter_map(|(is_missing, what)| is_missing.then_some(what))
}
