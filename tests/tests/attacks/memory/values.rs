//! Lists of very many small values: nothing is built of what the router does not read, and what it
//! reads is charged before it is built.

use futures_util::future::join_all;
use prost::Message;
use serde_json::json;
use splitrail_proto::v1;
use splitrail_tests::cluster::eventually;
use splitrail_tests::solo::{Solo, whole_reply};

use super::peak_mib;
use crate::grpc::{Caller, GENERATE, USUAL, framed};

const CHAT: &str = "/v1/chat/completions";

fn chat(rest: &str) -> String {
    format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"a"}}]{rest}}}"#)
}

fn list(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_no_template_reads_become_no_values() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    for (item, clients) in [("0", 1), ("[]", 1), ("{}", 1), ("0", 8)] {
        let body = chat(&format!(r#","x":{}"#, list(item, 1_000_000)));
        let body_mib = (clients * body.len() as u64) >> 20;
        let peak = peak_mib(&solo, async {
            let asked = (0..clients).map(|_| solo.http.post_with(CHAT, &[], body.clone()));
            for reply in join_all(asked).await {
                assert_eq!(reply.status, 200, "{}", reply.text());
            }
        })
        .await;
        // As values, they are 60 MiB and more.
        assert!(peak < 4 * body_mib + 20, "{item}: {peak} MiB more, for {body_mib} MiB");
    }
}

/// What a template does read finds its memory, or the request is shed: others are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_for_a_template_are_charged_before_they_are_built() {
    let limits = "{ request_memory_max: 50000000 }";
    let solo = Solo::start(limits, |_| whole_reply()).await;
    let dense = format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":{}}}]}}"#,
        list("0", 1_000_000)
    );
    let peak = peak_mib(&solo, async {
        let shed = solo.http.post_with(CHAT, &[], dense).await;
        assert_eq!((shed.status.as_u16(), shed.header("retry-after")), (503, "1"));
        assert!(shed.text().contains("limits.request_memory_max"), "{}", shed.text());
    })
    .await;
    assert!(peak < 60, "{peak} MiB more");
    assert_eq!(solo.metric("splitrail_shed_total", &[("reason", "request_memory")]).await, 1.0);
    let words =
        json!({"model": "sim", "messages": [{"role": "user", "content": "a ".repeat(1_000_000)}]});
    assert_eq!(solo.http.post(CHAT, &words).await.status, 200, "as long, and of words");
    eventually("all of it is given back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}

/// Lists that are read to be bounded: reading ends at the bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_with_too_many_entries_is_not_built_to_be_counted() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let (texts, ids) = (list("\"\"", 350_000), list("0", 350_000));
    for (path, rest, limit) in [
        ("/v1/completions", format!(r#""prompt":{texts}"#), "limits.batch_prompts_max"),
        ("/v1/completions", format!(r#""prompt":"a","stop":{texts}"#), "limits.stop_max"),
        ("/v1/completions", format!(r#""prompt":"a","stop_token_ids":{ids}"#), "limits.stop_max"),
        ("/v1/messages", format!(r#""max_tokens":1,"messages":{texts}"#), "limits.messages_max"),
        ("/v1/responses", format!(r#""input":{texts}"#), "limits.messages_max"),
        (CHAT, format!(r#""messages":{texts}"#), "limits.messages_max"),
        ("/v1/embeddings", format!(r#""input":{texts}"#), "limits.embedding_inputs_max"),
    ] {
        let body = format!(r#"{{"model":"sim",{rest}}}"#);
        let peak = peak_mib(&solo, async {
            let refused = solo.http.post_with(path, &[], body).await;
            assert_eq!(refused.status, 400, "{path}");
            assert!(refused.text().contains(limit), "{path}: {}", refused.text());
        })
        .await;
        assert!(peak < 8, "{path} {limit}: {peak} MiB more");
    }
    assert!(solo.post.heard().iter().all(|heard| !heard.is_inference()), "nothing was sent");
}

/// Two bytes of an empty message become a hundred, and one of a control character six.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_grpc_is_charged_for_what_it_becomes() {
    let messages = vec![v1::ChatMessage::default(); 1_000_000];
    let chat = v1::generate_request::Prompt::Chat(v1::Chat { messages });
    let text = v1::generate_request::Prompt::Text("\u{1}".repeat(4_000_000));
    for (prompt, group) in [(&chat, &[][..]), (&chat, &EMPTY_GROUP), (&text, &EMPTY_GROUP)] {
        let limits = "{ request_memory_max: 40000000 }";
        let solo = Solo::start(limits, |_| whole_reply()).await;
        let request = v1::GenerateRequest {
            model: "sim".into(),
            prompt: Some(prompt.clone()),
            ..Default::default()
        };
        let message = [group, &request.encode_to_vec()].concat();
        let peak = peak_mib(&solo, async {
            let shed = Caller::new(&solo).call(GENERATE, USUAL, &framed(&message)).await;
            assert_eq!(shed, (200, Some("8".into())), "RESOURCE_EXHAUSTED");
        })
        .await;
        assert!(peak < 40, "{peak} MiB more");
    }
}

/// A group (field 15) that is unknown, and so skipped.
const EMPTY_GROUP: [u8; 2] = [15 << 3 | 3, 15 << 3 | 4];
