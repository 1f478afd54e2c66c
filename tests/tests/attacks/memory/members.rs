//! Objects of very many members: what they take does not depend on how often they are sent on.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use serde_json::json;
use splitrail_tests::client::Client;
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::proc::processor_time;
use splitrail_tests::solo::{Solo, whole_reply};

use super::{members, peak_mib};
use crate::support::is_full_size;

const COMPLETIONS: &str = "/v1/completions";

/// A batch with further members.
fn batch(prompts: usize, members: &str) -> String {
    let prompts = vec!["\"a\""; prompts].join(",");
    format!(r#"{{"model":"sim","max_tokens":1,"prompt":[{prompts}]{members}}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_with_very_many_members_is_refused_before_a_table_is_made_of_them() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let body = batch(64, &members("x", 100_000));
    let bytes_mib = body.len() as u64 >> 20;
    let peak = peak_mib(&solo, async {
        let refused = solo.http.post_with(COMPLETIONS, &[], body).await;
        let told = refused.text();
        assert_eq!(refused.status, 400, "{told}");
        assert!(told.contains("more than 4096 members (limits.object_members_max) (line 1,"));
    })
    .await;
    assert!(peak < bytes_mib + 40, "{peak} MiB more, for a body of {bytes_mib} MiB");
    assert!(solo.post.heard().iter().all(|heard| !heard.is_inference()), "nothing was sent");
    assert_eq!(
        solo.http.post(COMPLETIONS, &json!({"model": "sim", "prompt": "a"})).await.status,
        200
    );
}

/// The body is as long as bodies may be made. Another client is asked how long it waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stderr)]
async fn very_many_members_times_sixty_four_prompts_are_refused_beside_other_clients() {
    let solo = Solo::start("{ body_size_max: 64MiB }", |_| whole_reply()).await;
    let count = if is_full_size() { 3_200_000 } else { 200_000 };
    let body = batch(64, &members("", count));
    let bytes_mib = body.len() as u64 >> 20;
    let is_over = AtomicBool::new(false);
    let probe = Client::new(solo.router.http);
    let probes = async {
        let mut longest = Duration::ZERO;
        while !is_over.load(Relaxed) {
            let asked = Instant::now();
            let reply = probe.post(COMPLETIONS, &json!({"model": "sim", "prompt": "a"})).await;
            assert_eq!(reply.status, 200);
            longest = longest.max(asked.elapsed());
        }
        longest
    };
    let peak = peak_mib(&solo, async {
        let attack = async {
            let refused = solo.http.post_with(COMPLETIONS, &[], body).await;
            is_over.store(true, Relaxed);
            refused.status
        };
        let (longest, status) = join(probes, attack).await;
        assert_eq!(status, 400);
        eprintln!("a body of {bytes_mib} MiB: another client waits {longest:?} at most");
    })
    .await;
    eprintln!("{peak} MiB more");
    assert!(peak < 300, "{peak} MiB more");
}

/// As many members as are allowed: what one prompt shares with the others is there once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prompts_of_a_batch_share_their_members() {
    let solo = Solo::start("{ in_flight_max: 1000000 }", |_| whole_reply()).await;
    let bias = members("", 4000);
    let bias = format!(r#","logit_bias":{{{}}}"#, bias.trim_start_matches(','));
    // Engines are not sent these. Escaped keys are read by another reader than plain ones.
    let many = members("x", 2000) + &members("\\u0061", 2000) + &bias;
    let body = batch(64, &many);
    let peak = peak_mib(&solo, async {
        let clients = (0..8).map(|_| async {
            let client = Client::new(solo.router.http);
            let reply = client.post_with(COMPLETIONS, &[], body.clone()).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        });
        join_all(clients).await;
    })
    .await;
    let heard = solo.post.heard().into_iter().filter(|heard| heard.is_inference());
    let sent: Vec<usize> = heard.map(|heard| heard.body.len()).collect();
    assert_eq!(sent.len(), 8 * 64);
    assert!(sent.iter().all(|bytes| *bytes > bias.len()), "all known members are sent on");
    // 512 tables of 4,000 members are 100 MiB.
    assert!(peak < 60, "{peak} MiB more");
}

/// Where an operator allows very many members, they are still read once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_for_members_grows_with_their_number_and_not_with_its_square() {
    let solo = Solo::start("{ object_members_max: 262144 }", |_| whole_reply()).await;
    let time = async |count: usize| {
        let body = batch(1, &members("x", count));
        let before = processor_time(solo.router.pid());
        let reply = solo.http.post_with(COMPLETIONS, &[], body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        processor_time(solo.router.pid()).saturating_sub(before)
    };
    time(1000).await;
    let (few, many) = (time(30_000).await, time(240_000).await);
    // Eight times as many: eight times the work, or sixty-four times.
    assert!(many <= 24 * few, "{few:?} and {many:?}");
}

/// Objects that are read again on the way, at every endpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_object_inside_a_body_has_very_many_members() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let many = format!("{{\"a\":1{}}}", members("x", 150_000));
    let cases = [
        (COMPLETIONS, format!(r#""prompt":"a"{}"#, members("x", 150_000))),
        (COMPLETIONS, format!(r#""prompt":"a","stream":true,"stream_options":{many}"#)),
        (COMPLETIONS, format!(r#""prompt":"a","vllm_xargs":{many}"#)),
        ("/v1/chat/completions", format!(r#""messages":[{{"role":"user","content":{many}}}]"#)),
        ("/v1/responses", format!(r#""input":"a","metadata":{many}"#)),
        ("/v1/messages", format!(r#""max_tokens":1,"messages":[{many}]"#)),
        ("/inference/v1/generate", format!(r#""token_ids":[1],"sampling_params":{many}"#)),
        ("/v1/embeddings", format!(r#""input":"a","x":[{many}]"#)),
        ("/tokenize", format!(r#""prompt":"a","x":{{"y":{many}}}"#)),
    ];
    let peak = peak_mib(&solo, async {
        for (path, rest) in cases {
            let body = format!(r#"{{"model":"sim",{rest}}}"#);
            let refused = solo.http.post_with(path, &[], body).await;
            let told = refused.text();
            assert_eq!(refused.status, 400, "{path}: {told}");
            assert!(told.contains("limits.object_members_max"), "{path}: {told}");
        }
        let extra = format!("{{\"x\":{many}}}");
        let refused = generate(solo.router.grpc, text_request("a", &extra)).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert!(refused.message().contains("limits.object_members_max"), "{refused:?}");
    })
    .await;
    assert!(peak < 40, "{peak} MiB more");
    assert!(solo.post.heard().iter().all(|heard| !heard.is_inference()), "nothing was sent");
}

/// The bound is at 4,096 members, and the configuration moves it.
#[tokio::test]
async fn members_are_counted_up_to_the_configured_bound() {
    let solo = Solo::start("{ object_members_max: 100 }", |_| whole_reply()).await;
    // `model`, `max_tokens` and `prompt` are there already.
    for (count, status) in [(97, 200), (98, 400)] {
        let body = batch(1, &members("x", count));
        assert_eq!(solo.http.post_with(COMPLETIONS, &[], body).await.status, status, "{count}");
        let bias = format!(r#","logit_bias":{{"a":0{}}}"#, members("x", count + 2));
        let body = batch(1, &bias);
        assert_eq!(solo.http.post_with(COMPLETIONS, &[], body).await.status, status, "{count}");
    }
}
