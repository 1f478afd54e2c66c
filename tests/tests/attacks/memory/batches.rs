//! A batch is as many requests as it has prompts.

use futures_util::future::join_all;
use serde_json::json;
use splitrail_tests::client::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::post::Answer;
use splitrail_tests::proc::open_files;
use splitrail_tests::solo::{Solo, whole_answer};

const COMPLETIONS: &str = "/v1/completions";

/// Prompts of a batch.
const PROMPTS: usize = 16;

/// Answers wait until the engine is told to let go, those of one client's requests at once.
fn held_for_batches(heard: &splitrail_tests::post::Heard) -> Answer {
    let Answer::Bytes(whole) = whole_answer() else { unreachable!("a whole answer") };
    match heard.text().contains("single") {
        true => Answer::Bytes(whole),
        false => Answer::Held { first: Vec::new(), last: whole },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_shed_by_their_prompts_and_other_clients_are_served() {
    let limits = "{ in_flight_max: 90, fair_by: { kind: header, name: x-api-key } }";
    let solo = Solo::start(limits, held_for_batches).await;
    let files = open_files(solo.router.pid());
    let body = json!({"model": "sim", "max_tokens": 1, "prompt": vec!["a"; PROMPTS]});
    let ask = |_: usize| async {
        let headers = [("x-api-key", "greedy")];
        let client = Client::new(solo.router.http);
        client.post_with(COMPLETIONS, &headers, body.to_string()).await
    };
    let batches = join_all((0..30).map(ask));
    let others = async {
        // 80 of 90 are a single client's share: five batches.
        eventually("the greedy client has its share", async || {
            let shed = solo.metric("splitrail_shed_total", &[("reason", "fair_share")]).await;
            shed >= 25.0 && solo.post.open() >= 5 * PROMPTS
        })
        .await;
        let legs = solo.post.heard().iter().filter(|heard| heard.is_inference()).count();
        assert_eq!(legs, 5 * PROMPTS, "no leg of a batch that was shed was sent");
        let taken = open_files(solo.router.pid()).saturating_sub(files);
        assert!(taken <= 3 * 90, "{taken} files for 90 places");
        for _ in 0..10 {
            let single = json!({"model": "sim", "prompt": "single"});
            let headers = [("x-api-key", "modest")];
            let reply = solo.http.post_with(COMPLETIONS, &headers, single.to_string()).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        solo.post.release();
    };
    let (replies, ()) = futures_util::future::join(batches, others).await;
    let of = |status: u16| replies.iter().filter(|reply| reply.status == status).count();
    assert_eq!((of(200), of(429)), (5, 25));
    let shed = replies.iter().filter(|reply| reply.status == 429);
    assert!({ shed }.all(|reply| !reply.header("retry-after").is_empty()));
    // All places are free again.
    eventually("a batch finds room", async || ask(30).await.status == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_finds_no_room_for_all_its_prompts_is_shed_whole() {
    let solo = Solo::start("{ in_flight_max: 40 }", held_for_batches).await;
    let body =
        |prompts: usize| json!({"model": "sim", "max_tokens": 1, "prompt": vec!["a"; prompts]});
    let large = body(32);
    let first = solo.http.post(COMPLETIONS, &large);
    let others = async {
        eventually("it is served", async || solo.post.open() >= 32).await;
        let shed = Client::new(solo.router.http).post(COMPLETIONS, &body(16)).await;
        assert_eq!((shed.status.as_u16(), shed.header("retry-after")), (503, "1"));
        assert!(shed.text().contains("limits.in_flight_max"), "{}", shed.text());
        let never = Client::new(solo.router.http).post(COMPLETIONS, &body(41)).await;
        assert_eq!(never.status, 400, "there is never room for it: {}", never.text());
        let single = json!({"model": "sim", "prompt": "single"});
        assert_eq!(Client::new(solo.router.http).post(COMPLETIONS, &single).await.status, 200);
        solo.post.release();
    };
    let (first, ()) = futures_util::future::join(first, others).await;
    assert_eq!(first.status, 200, "{}", first.text());
}
