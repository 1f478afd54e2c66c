//! Where cache hits were lost: reasons that add up to what was missing.

use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

async fn figures(cluster: &Cluster) -> ([f64; 5], f64, f64) {
    let of = async |name: &str, label: &str, value: &str| {
        cluster.metric(&format!("splitrail_{name}"), &[(label, value)]).await
    };
    let mut lost = [0.0; 5];
    for (sum, reason) in lost.iter_mut().zip(["cold", "evicted", "diverted", "stale", "parity"]) {
        *sum = of("cache_loss_blocks", "reason", reason).await;
    }
    (lost, of("cache_hit_blocks", "of", "found").await, of("cache_hit_blocks", "of", "best").await)
}

#[tokio::test]
async fn round_robin_loses_cached_tokens_by_diversion_and_the_parts_add_up() {
    let spec = Spec {
        policy: "{ kind: round_robin }",
        model: "cache_loss_tracking: {}\n".into(),
        ..Spec::aggregated(2)
    };
    let cluster = Cluster::start(spec).await;
    let body = completion(&prompt(60, "a"));
    for _ in 0..4 {
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
        cluster.settle().await;
    }
    let (lost, found, best) = figures(&cluster).await;
    // The second went to the other worker; the third and fourth found what they wanted.
    let blocks = best / 3.0;
    assert_eq!((lost, found), ([0.0, 0.0, blocks, 0.0, 0.0], 2.0 * blocks));
    assert_eq!(lost.iter().sum::<f64>(), best - found);
}

#[tokio::test]
async fn evicted_blocks_are_distinguished_from_blocks_never_held() {
    let spec = Spec {
        model: "cache_loss_tracking: {}\n".into(),
        engine: |_, config| config.kv_blocks = 128,
        ..Spec::aggregated(1)
    };
    let cluster = Cluster::start(spec).await;
    let send = async |salt: &str| {
        let body = completion(&prompt(120, salt));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
        cluster.settle().await;
    };
    send("first").await;
    assert_eq!(figures(&cluster).await.2, 0.0, "nothing of it came before");
    for other in ["second", "third"] {
        send(other).await;
    }
    send("first").await;
    let (lost, found, best) = figures(&cluster).await;
    let [cold, evicted, diverted, stale, parity] = lost;
    assert!(evicted > 0.0 && best > 0.0, "{lost:?} of {best}");
    assert_eq!((cold, diverted, parity), (0.0, 0.0, 0.0));
    assert_eq!(evicted + stale, best - found);
}
