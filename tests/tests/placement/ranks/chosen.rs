//! Who chooses the rank: never a client, and where the engine does, only what all ranks hold
//! counts.

use splitrail_sim::SimConfig;
use splitrail_tests::trial::{COMPLETIONS, completion};
use splitrail_tests::{Spec, Trial};

use super::support::{ask, in_step, known, pinned, served, text, two};

#[tokio::test]
async fn a_rank_that_a_client_names_is_ignored() {
    let one: fn(&str, &mut SimConfig) = |_, _| {};
    for (engine, pins) in [(two as fn(&str, &mut SimConfig), true), (one, false)] {
        let mut trial = Trial::start(Spec { engine, ..Spec::aggregated(1) }).await;
        if pins {
            known(&trial.cluster, true).await;
        }
        trial.expect("ok");
        let mut body = completion(&text(0));
        body["data_parallel_rank"] = 7.into();
        let headers = [("content-type", "application/json"), ("x-data-parallel-rank", "7")];
        let reply = trial.cluster.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let asked = served(&trial, "w0").pop().unwrap();
        assert!(asked.body["data_parallel_rank"].is_null());
        assert_eq!(pinned(&asked).is_some(), pins);
        assert!(pinned(&asked).is_none_or(|rank| rank < 2));
        trial.finish().await;
    }
}

fn choosing(name: &str, config: &mut SimConfig) {
    two(name, config);
    config.honour_rank_header = false;
    config.honour_threshold = false;
}

#[tokio::test]
async fn if_the_engine_chooses_the_rank_only_blocks_on_all_ranks_are_reported() {
    let mut trial = Trial::start(Spec { engine: choosing, ..Spec::aggregated(1) }).await;
    known(&trial.cluster, false).await;
    // It takes its ranks in turn: the second time the other one has it, too.
    for overlap_blocks in [0, 0, text(0).len() / 16] {
        let (_, decision) = ask(&mut trial, &text(0)).await;
        let candidates = decision["candidates"].as_array().unwrap();
        assert_eq!(candidates.len(), 1, "one for the worker: {decision}");
        assert!(candidates[0]["rank"].is_null());
        assert_eq!(decision["overlap_blocks"], overlap_blocks);
        assert_eq!(pinned(&served(&trial, "w0").pop().unwrap()), None);
        in_step(&trial.cluster).await;
    }
    trial.finish().await;
}

#[tokio::test]
async fn if_the_engine_chooses_the_rank_the_gate_opens_when_all_ranks_hold_enough() {
    for worker in [(|_| "") as fn(&str) -> &'static str, |_| ", shim: true"] {
        let flow = "decode_first";
        let spec =
            Spec { prefill: 1, decode: 1, flow, engine: choosing, worker, ..Spec::default() };
        let mut trial = Trial::start(spec).await;
        known(&trial.cluster, false).await;
        for tried in ["skipped", "skipped", "served"] {
            let (reply, decision) = ask(&mut trial, &text(0)).await;
            let seen = (reply.route("gate"), reply.route("try"));
            assert_eq!(seen, (Some("router"), Some(tried)), "{decision}");
            trial.cluster.quiet().await;
            in_step(&trial.cluster).await;
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn the_rank_that_was_chosen_is_explained_before_and_after() {
    let mut trial = Trial::start(Spec { engine: two, ..Spec::aggregated(1) }).await;
    known(&trial.cluster, true).await;
    let (_, first) = ask(&mut trial, &text(0)).await;
    in_step(&trial.cluster).await;
    let rank = &first["candidates"][0]["rank"];
    let explain = async |query: &str, body: String| {
        let path = format!("/admin/explain{query}");
        let headers = [("content-type", "application/json")];
        let reply = trial.cluster.admin.post_with(&path, &headers, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    };
    let told = explain("", completion(&text(0)).to_string()).await;
    let step = &told["explanation"]["prompts"][0]["steps"][0];
    assert_eq!((&step["chosen"], &step["chosen_rank"]), (&"w0".into(), rank), "{told}");
    assert_eq!(step["runner_up"], "w0");
    assert_ne!(&step["runner_up_rank"], rank);
    let id = first["request_id"].as_str().unwrap();
    let told = explain(&format!("?request_id={id}"), String::new()).await;
    let choice = &told["decisions"][0]["choices"][0];
    assert_eq!(&choice["chosen_rank"], rank, "{told}");
    assert_ne!(&choice["runner_up_rank"], rank);
    trial.finish().await;
}
