//! Which threshold a request has, and which are refused.

use serde_json::json;
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use splitrail_tests::{Spec, Trial};

use super::support::*;

const HEADER: &str = "x-splitrail-cache-hit-threshold";

#[tokio::test]
async fn the_body_goes_before_the_header_and_that_before_the_model() {
    let model = "cache_hit_threshold: 0.25\ngate: { kind: engine, index_first: false }";
    let trial = Trial::start(with_model(model)).await;
    for (turn, (inside, header, threshold)) in [
        (Some(0.5), Some("0.75"), 0.5),
        (None, Some("0.75"), 0.75),
        (None, None, 0.25),
        (Some(0.0), Some("1"), 0.0),
        (None, Some("0"), 0.0),
    ]
    .into_iter()
    .enumerate()
    {
        let body = body(0, 100 + turn, inside).to_string();
        let headers: Vec<_> = header.iter().map(|value| (HEADER, *value)).collect();
        let reply = trial.cluster.http.post_with(COMPLETIONS, &headers, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let record = &trial.cluster.decisions(reply.header("x-request-id")).await[0];
        assert_eq!(record["cache_hit_threshold"], json!(threshold));
        let outcome = if threshold == 0.0 { "served" } else { "rejected" };
        assert_eq!(record["decode_try"], outcome, "0 never rejects");
    }
    let ratio = trial.cluster.metric("splitrail_cache_hit_threshold_ratio", &[]).await;
    assert_eq!(ratio, 0.25);
}

#[tokio::test]
async fn a_threshold_outside_0_to_1_is_refused_in_every_flow() {
    for spec in [Spec::aggregated(1), Spec::default(), asking()] {
        let mut trial = Trial::start(spec).await;
        let before: usize =
            trial.cluster.engines.iter().map(|(name, _)| trial.asked(name).len()).sum();
        for wrong in [json!(-0.1), json!(1.01), json!("0.5"), json!(true), json!([0.5]), json!({})]
        {
            for (path, mut body) in
                [(CHAT, chat(&prompt(9, "bad"))), (COMPLETIONS, completion(&prompt(9, "bad")))]
            {
                body["cache_hit_threshold"] = wrong.clone();
                let reply = trial.post("invalid_request", path, &body).await;
                assert_eq!(reply.status, 400, "{wrong}: {}", reply.text());
                assert_eq!(reply.json()["error"]["param"], "cache_hit_threshold");
            }
        }
        for wrong in ["", "-0.1", "1.01", "half", "NaN", "inf", "0.5, 0.5"] {
            trial.expect("invalid_request");
            let body = completion("x").to_string();
            let reply = trial.cluster.http.post_with(COMPLETIONS, &[(HEADER, wrong)], body).await;
            assert_eq!(reply.status, 400, "{wrong}: {}", reply.text());
        }
        let after: usize =
            trial.cluster.engines.iter().map(|(name, _)| trial.asked(name).len()).sum();
        assert_eq!(before, after, "no engine was asked");
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_threshold_in_another_flow_changes_nothing() {
    let trial = Trial::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let reply = trial.cluster.http.post(COMPLETIONS, &body(0, 100, Some(0.5))).await;
    assert_eq!(reply.route("flow"), Some("prefill_first"));
    assert_eq!(tried(&reply), ("-", "-"));
    for name in ["p0", "d0"] {
        let asked = trial.asked(name);
        assert!(asked.iter().all(|seen| seen.body.get("cache_hit_threshold").is_none()));
    }
}
