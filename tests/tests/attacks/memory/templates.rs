//! Chat templates whose work grows with the square of a chat: bounded in time, and given up with
//! the client.

use std::time::Duration;

use serde_json::json;
use splitrail_tests::client::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::processor_time;
use splitrail_tests::raw::request;
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::peak_mib;

const CHAT: &str = "/v1/chat/completions";

/// It gathers system messages before it prints anything, as DeepSeek's templates do.
const GATHERING: &str = "{% set ns = namespace(s='') %}{% for m in messages %}\
    {% set ns.s = ns.s + '\\n\\n' + m['content'] %}{% endfor %}{{ ns.s }}";

/// The same for each message: hours for a chat of some megabytes, within any bound on steps.
const ENDLESS: &str = "{% for n in messages %}{% set ns = namespace(s='') %}{% for m in messages %}\
    {% set ns.s = ns.s + m['content'] %}{% endfor %}{% endfor %}x";

/// It prints the definitions of tools with an indentation, as Llama's templates do.
const INDENTING: &str = "{% if tools %}{{ tools|tojson(indent=4) }}{% endif %}\
    {{ messages[0]['content'] }}";

/// It takes a text apart and puts it together again, as templates do that drop the reasoning.
const SPLITTING: &str = "{% set ns = namespace(s='') %}{% for m in messages %}\
    {% set parts = m['content'].split(',') %}{% set ns.s = ns.s ~ parts|join('\n') %}\
    {% set ns.s = ns.s|replace('\n', ' ') + m['content'].split() | join(' ') %}{% endfor %}\
    {{ ns.s|length }}";

fn chat(messages: usize, bytes: usize) -> String {
    let message = json!({"role": "system", "content": "words ".repeat(bytes / 6)});
    json!({"model": "sim", "max_tokens": 1, "messages": vec![message; messages]}).to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_has_a_bounded_number_of_messages() {
    let solo = Solo::with_template("{}", GATHERING, |_| whole_reply()).await;
    let refused = solo.http.post_with(CHAT, &[], chat(40_000, 60)).await;
    assert_eq!(refused.status, 400);
    let told = refused.text();
    assert!(told.contains("`messages` has more than 4096 entries (limits.messages_max)"), "{told}");
    assert_eq!(solo.http.post_with(CHAT, &[], chat(1000, 60)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_that_takes_too_long_is_given_up_and_its_request_served() {
    let limits = "{ template_timeout: 50ms }";
    let solo = Solo::with_template(limits, ENDLESS, |_| whole_reply()).await;
    let reply = solo.http.post_with(CHAT, &[], chat(4000, 500)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let reason = "rendering_the_chat_takes_too_much_time_or_memory";
    let unknown = solo.metric("splitrail_untokenized_prompts_total", &[("reason", reason)]).await;
    assert_eq!(unknown, 1.0, "it was placed by load alone");
}

/// A router at work on chats that take hours, and the clients that wait for them.
async fn rendering(clients: usize) -> (Solo, Vec<TcpStream>) {
    let limits = "{ template_timeout: 24h, drain_delay: 10ms, drain_grace: 1h }";
    let solo = Solo::with_template(limits, ENDLESS, |_| whole_reply()).await;
    let mut waiting = Vec::new();
    for _ in 0..clients {
        let mut client = TcpStream::connect(solo.router.http).await.unwrap();
        client.write_all(&request("POST", CHAT, &[], chat(4000, 1000).as_bytes())).await.unwrap();
        waiting.push(client);
    }
    let before = processor_time(solo.router.pid());
    eventually("the template is rendered", async || {
        processor_time(solo.router.pid()) >= before + Duration::from_secs(1)
    })
    .await;
    (solo, waiting)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_are_given_up_when_their_clients_leave_and_others_are_served_meanwhile() {
    let (solo, clients) = rendering(6).await;
    let other = Client::new(solo.router.http);
    for _ in 0..3 {
        assert_eq!(other.post_with(CHAT, &[], chat(1, 20_000)).await.status, 200);
    }
    drop(clients);
    eventually("the router rests", async || {
        let before = processor_time(solo.router.pid());
        tokio::time::sleep(Duration::from_millis(500)).await;
        processor_time(solo.router.pid()) <= before + Duration::from_millis(100)
    })
    .await;
    let short = json!({"model": "sim", "messages": [{"role": "user", "content": "a"}]});
    assert_eq!(Client::new(solo.router.http).post(CHAT, &short).await.status, 200);
}

/// Each zero within ninety lists is printed on a line of its own, of 370 bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_makes_a_bounded_text_of_a_chat_that_grows_when_it_is_indented() {
    let solo = Solo::with_template("{}", INDENTING, |_| whole_reply()).await;
    let (open, close) = ("[".repeat(90), "]".repeat(90));
    for zeros in [50_000, 168_000] {
        let parameters = format!(r#"{{"a":{open}{}{close}}}"#, vec!["0"; zeros].join(","));
        let tool =
            format!(r#"{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}"#);
        let body = format!(
            r#"{{"model":"sim","messages":[{{"role":"user","content":"a"}}],"tools":[{tool}]}}"#
        );
        let allowed_mib = (200 * body.len() as u64) >> 20;
        let peak = peak_mib(&solo, async {
            let reply = solo.http.post_with(CHAT, &[], body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        })
        .await;
        assert!(peak < allowed_mib + 20, "{peak} MiB more for {zeros} zeros");
    }
    let reason = "rendering_the_chat_takes_too_much_time_or_memory";
    let unknown = solo.metric("splitrail_untokenized_prompts_total", &[("reason", reason)]).await;
    assert_eq!(unknown, 2.0, "they were placed by load alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_template_that_splits_joins_and_replaces_holds_a_bounded_multiple_of_a_chat() {
    let solo = Solo::with_template("{ template_timeout: 1h }", SPLITTING, |_| whole_reply()).await;
    for part in [",", "a ", ",\n"] {
        let message = json!({"role": "user", "content": part.repeat((2 << 20) / part.len())});
        let body = json!({"model": "sim", "max_tokens": 1, "messages": [message]}).to_string();
        let allowed_mib = (200 * body.len() as u64) >> 20;
        let peak = peak_mib(&solo, async {
            let reply = solo.http.post_with(CHAT, &[], body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        })
        .await;
        assert!(peak < allowed_mib + 20, "{peak} MiB more for {part:?}");
    }
    let unknown = solo.metric("splitrail_untokenized_prompts_total", &[]).await;
    assert_eq!(unknown, 0.0, "all of them were rendered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_stop_signal_waits_for_no_template() {
    let (solo, _clients) = rendering(1).await;
    solo.router.signal("TERM");
    let refuses = async || TcpStream::connect(solo.router.http).await.is_err();
    eventually("it drains, and accepts no connection", refuses).await;
    solo.router.signal("TERM");
    let mut router = solo.router;
    eventually("the process has ended", async || router.has_ended()).await;
}
