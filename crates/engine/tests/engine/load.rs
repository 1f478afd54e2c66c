//! Load figures from recorded and constructed `/metrics` texts.

use crate::support::{fixture_text, sglang_fixture};
use proptest::prelude::*;
use splitrail_engine::EngineKind;
use splitrail_engine::load::{EngineLoad, InterToken, PromptTokensBySource};

fn parse(text: &str) -> EngineLoad {
    EngineKind::Vllm.load(text.as_bytes())
}

#[test]
fn two_data_parallel_engines_are_summed() {
    let load = parse(&fixture_text("metrics/dp2.txt"));
    let expected = EngineLoad {
        running: Some(0),
        waiting: Some(0),
        kv_used_ratio: Some(0.0),
        preemptions_total: Some(0),
        prefix_cache_queries_total: Some(288 + 384),
        prompt_tokens_by_source: PromptTokensBySource {
            local_compute: Some(288 + 320),
            external_kv_transfer: Some(0),
        },
        block_size: Some(32),
        // 32,768 each, of 1 GiB: both lines have the total.
        total_blocks: Some(65_536),
        ranks: Some(2),
        requests_by_rank: vec![0, 0],
        started_at_s: load.started_at_s,
        tokens_total: Some(288 + 384 + 6 + 8),
        inter_token: load.inter_token,
        kv_dtype: Some("auto".into()),
        kv_layout: None,
        has_nixl: false,
        is_asleep: Some(false),
    };
    assert_eq!(load, expected);
}

#[test]
fn two_data_parallel_engines_are_two_before_their_first_request() {
    let load = parse(&fixture_text("metrics/dp2_fresh.txt"));
    assert_eq!((load.ranks, load.total_blocks), (Some(2), Some(2 * 800)));
    assert_eq!((load.running, load.waiting), (None, None), "two API servers do not say it yet");
    assert_eq!(load.requests_by_rank, [0, 0]);
    // The first engine has had a request; the other one's figures are still missing.
    let first = "vllm:num_requests_running{engine=\"0\"} 3\n";
    let load = parse(&(fixture_text("metrics/dp2_fresh.txt") + first));
    assert_eq!((load.ranks, load.running), (Some(2), Some(3)));
    assert_eq!(load.requests_by_rank, [3, 0]);
}

#[test]
fn requests_by_rank_are_reported_for_several_ranks_in_order() {
    let of = |rank: u32, running: u32, waiting: u32| {
        let label = format!("{{engine=\"{rank}\",model_name=\"m\"}}");
        let (name, queue) = ("vllm:num_requests_running", "vllm:num_requests_waiting");
        format!("{name}{label} {running}.0\n{queue}{label} {waiting}.0\n")
    };
    let by_rank = |text: &str| parse(text).requests_by_rank;
    assert_eq!(by_rank(&(of(1, 3, 0) + &of(0, 1, 6))), [7, 3]);
    assert!(by_rank(&of(0, 1, 6)).is_empty(), "the sum is enough");
    assert!(by_rank(&(of(1, 3, 0) + &of(2, 1, 6))).is_empty(), "the engines' numbers have a gap");
}

#[test]
fn the_mean_token_interval_is_computed_between_two_reports() {
    let load = parse(&fixture_text("metrics/dp2.txt"));
    let waits = load.inter_token.unwrap();
    assert_eq!(waits.count, 3 + 4);
    assert_eq!(waits.mean_us_since(&InterToken::default()), Some(3090));
    assert_eq!(waits.mean_us_since(&waits), None, "nothing was generated");
    assert_eq!(InterToken::default().mean_us_since(&waits), None, "the counters were reset");
}

#[test]
fn another_process_began_at_another_time_or_has_counted_less() {
    let load = parse(&fixture_text("metrics/a_after.txt"));
    assert!(!load.is_of_another_process(&load));
    assert_eq!(load.ranks, Some(1));
    let later = EngineLoad { started_at_s: Some(1_795_149_000.0), ..load.clone() };
    assert!(later.is_of_another_process(&load));
    let unsaid = EngineLoad { started_at_s: None, ..load };
    let fresh = EngineLoad { prefix_cache_queries_total: Some(0), ..unsaid.clone() };
    assert!(fresh.is_of_another_process(&unsaid));
    assert!(!unsaid.is_of_another_process(&fresh), "its counters have only increased");
    assert!(!EngineLoad::default().is_of_another_process(&unsaid), "nothing is known");
}

#[test]
fn only_an_engine_with_nixl_counts_its_transfers() {
    assert!(parse(&fixture_text("metrics/d_nixl.txt")).has_nixl);
    assert!(!parse(&fixture_text("metrics/a_after.txt")).has_nixl);
}

#[test]
fn a_decode_engine_reports_what_it_received() {
    let load = parse(&fixture_text("metrics/d_nixl.txt"));
    assert!(load.prompt_tokens_by_source.external_kv_transfer.unwrap() > 0);
    let load = parse(&fixture_text("metrics/a_after.txt"));
    assert_eq!(load.prompt_tokens_by_source.external_kv_transfer, Some(0));
}

#[test]
fn absent_figures_are_none_and_not_zero() {
    assert_eq!(parse(""), EngineLoad::default());
    let text = "# HELP vllm:num_requests_running x\nother:num_requests_running 3\n\
                vllm:num_requests_running_more 4\nvllm:num_requests_running{engine=\"0\"} 5\n";
    let expected = EngineLoad { running: Some(5), ranks: Some(1), ..Default::default() };
    assert_eq!(parse(text), expected);
}

#[test]
fn values_that_are_no_figures_are_left_out() {
    for value in ["NaN", "-1", "+Inf", "1e300", "0.5", "x", ""] {
        let text = format!("vllm:num_requests_waiting {value}\n");
        assert_eq!(parse(&text).waiting, None, "{value}");
    }
    for value in ["NaN", "-0.1", "1.1"] {
        let text = format!("vllm:kv_cache_usage_perc {value}\n");
        assert_eq!(parse(&text).kv_used_ratio, None, "{value}");
    }
    let unset = "vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"None\"} 1.0\n";
    assert_eq!(parse(unset), EngineLoad::default());
}

#[test]
fn the_block_size_is_that_of_full_attention() {
    let of = |effective: &str| {
        let labels = format!("block_size=\"16\",effective_attention_block_size=\"{effective}\"");
        parse(&format!("vllm:cache_config_info{{{labels}}} 1.0\n")).block_size
    };
    assert_eq!((of("64"), of("None")), (Some(64), Some(16)));
}

#[test]
fn labels_may_hold_braces_quotes_and_other_labels_names() {
    let text = "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\\\"} 9\"} 0.25 1700000000\n\
                vllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n\
                vllm:prompt_tokens_by_source_total{model_name=\"source=\\\"\",source=\"local_compute\"} 7\n";
    let load = parse(text);
    assert_eq!(load.kv_used_ratio, Some(0.5));
    assert_eq!(load.prompt_tokens_by_source.local_compute, Some(7));
}

#[test]
fn an_sglang_engine_says_its_requests_and_its_cache() {
    let text = sglang_fixture("metrics.txt");
    let load = EngineKind::Sglang.load(&text);
    let expected = EngineLoad {
        running: Some(1),
        waiting: Some(0),
        kv_used_ratio: Some(0.02),
        prefix_cache_queries_total: Some(1500),
        block_size: Some(16),
        total_blocks: Some(1250),
        ranks: Some(1),
        tokens_total: Some(1500 + 36),
        inter_token: load.inter_token,
        ..EngineLoad::default()
    };
    assert_eq!(load, expected);
    assert_eq!(load.inter_token.unwrap().count, 50);
    assert_eq!(EngineKind::Vllm.load(&text), EngineLoad::default());
    let later = String::from_utf8(text).unwrap().replace("1500.0", "300.0");
    let later = EngineKind::Sglang.load(later.as_bytes());
    assert!(later.is_of_another_process(&load) && !load.is_of_another_process(&later));
}

#[test]
fn sglang_ranks_are_summed() {
    let of = |rank: u32, running: u32| {
        let labels = format!("{{dp_rank=\"{rank}\",model_name=\"m\",tp_rank=\"{rank}\"}}");
        format!("sglang:num_running_reqs{labels} {running}.0\nsglang:num_pages{labels} 100.0\n")
    };
    let load = EngineKind::Sglang.load((of(1, 3) + &of(0, 2)).as_bytes());
    assert_eq!((load.running, load.total_blocks, load.ranks), (Some(5), Some(200), Some(2)));
    assert_eq!(load.requests_by_rank, [2, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_panics(lines in proptest::collection::vec("(vllm:cache_config_info|vllm:num_requests_running|vllm:kv_cache_usage_perc)?[{}=\"\\\\, a-e0-9é.]{0,40}", 0..8)) {
        let load = parse(&lines.join("\n"));
        prop_assert!(load.kv_used_ratio.is_none_or(|ratio| (0.0..=1.0).contains(&ratio)));
    }
}
