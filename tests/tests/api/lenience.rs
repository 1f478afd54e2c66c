//! Requests that engines accept, and errors of engines, in the forms in which they come.

use serde_json::{Value, json};
use splitrail_tests::dialect::MESSAGES;
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::shape::openai_error;
use splitrail_tests::solo::{Solo, whole_reply};
use splitrail_tests::trial::{CHAT, COMPLETIONS};

#[tokio::test]
async fn counts_and_flags_that_engines_accept_are_accepted_and_sent_as_plain_values() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    for (member, given, sent) in [
        ("max_tokens", json!(16.0), json!(16)),
        ("max_tokens", json!("16"), json!(16)),
        ("n", json!(1.0), json!(1)),
        ("stream", json!(0), json!(false)),
        ("stream", json!("false"), json!(false)),
        ("seed", json!(1.0), json!(1.0)),
    ] {
        let mut body = json!({"model": "sim", "prompt": "a"});
        body[member] = given.clone();
        let reply = solo.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{member} {given}: {}", reply.text());
        let heard = solo.post.heard().into_iter().rfind(|heard| heard.is_inference()).unwrap();
        let heard: Value = serde_json::from_slice(&heard.body).unwrap();
        assert_eq!(heard[member], sent, "{member} {given}");
    }
    let body = json!({"model": "sim", "prompt": "a", "max_tokens": 16.5});
    let reply = solo.http.post(COMPLETIONS, &body).await;
    assert_eq!(openai_error(&reply, 400)["param"], "max_tokens");
}

#[tokio::test]
async fn a_client_gets_the_words_of_the_engine_whatever_form_they_have() {
    const WORDS: &str = "the prompt has 9000 tokens of 8192";
    let solo = Solo::start("{}", |heard| {
        let text = heard.text();
        let is_text = text.contains("plain text");
        let body = match is_text {
            true => WORDS.to_owned(),
            false => json!({"detail": [{"loc": ["body", "messages"], "msg": WORDS}]}).to_string(),
        };
        ScriptedReply::json(if is_text { 413 } else { 422 }, &body)
    })
    .await;
    for (form, status, param) in [("plain text", 413, None), ("detail", 422, Some("messages"))] {
        for path in [CHAT, MESSAGES] {
            let messages = json!([{"role": "user", "content": form}]);
            let body = json!({"model": "sim", "max_tokens": 4, "messages": messages});
            let reply = solo.http.post(path, &body).await;
            let error = openai_error(&reply, status);
            assert_eq!((error["message"].as_str(), error["param"].as_str()), (Some(WORDS), param));
            assert_eq!(reply.json()["type"] == "error", path == MESSAGES);
        }
    }
}
