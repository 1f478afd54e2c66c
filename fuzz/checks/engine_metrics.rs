//! The text of an engine's `/metrics`.

use splitrail_engine::EngineKind;

pub(crate) fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let parse = |text: &str| EngineKind::Vllm.load(text.as_bytes());
    let once = parse(&text);
    if let Some(ratio) = once.kv_used_ratio {
        assert!((0.0..=1.0).contains(&ratio), "{ratio}");
    }
    let noise = format!("# TYPE vllm:x gauge\n{text}\nvllm:num_requests_running{{ 5\nother 7");
    assert_eq!(parse(&noise), once, "comments, broken and others' lines count nothing");

    let noise = format!("{noise}\n").replace("vllm:", "sglang:");
    let other = EngineKind::Sglang.load(noise.as_bytes());
    assert!(other.kv_used_ratio.is_none_or(|ratio| (0.0..=1.0).contains(&ratio)));

    // A second engine that says the same: sums double, the mean stays.
    let twice = parse(&format!("{text}\n{text}"));
    let double = |count: Option<u64>| count.map(|count| count.saturating_mul(2));
    assert_eq!(twice.running, double(once.running));
    assert_eq!(twice.waiting, double(once.waiting));
    assert_eq!(twice.preemptions_total, double(once.preemptions_total));
    assert_eq!(twice.prefix_cache_queries_total, double(once.prefix_cache_queries_total));
    let (of_twice, of_once) = (&twice.prompt_tokens_by_source, &once.prompt_tokens_by_source);
    assert_eq!(of_twice.local_compute, double(of_once.local_compute));
    assert_eq!(of_twice.external_kv_transfer, double(of_once.external_kv_transfer));
    assert_eq!(twice.block_size, once.block_size);
    assert_eq!(twice.total_blocks, once.total_blocks, "each says the sum of all");
    match (once.kv_used_ratio, twice.kv_used_ratio) {
        (Some(once), Some(twice)) => assert!((once - twice).abs() < 1e-9, "{once} {twice}"),
        (once, twice) => assert_eq!(once, twice),
    }
}
