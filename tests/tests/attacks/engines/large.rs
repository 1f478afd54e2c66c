//! Answers, and reports of engines, that are larger than is allowed.

use futures_util::future::join_all;
use serde_json::json;
use splitrail_tests::canned::Canned;
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::Solo;

use super::{COMPLETIONS, ask, completion, generated, no_breaker_is_open};
use crate::support::{HTTP1_STREAM_KIB, REST_KIB};

const LIMITS: &str = "{ engine_reply_size_max: 65536 }";

/// Two engines, since another worker would be asked if that made sense.
async fn with_replies(bytes: String) -> ([RawEngine; 2], Front) {
    let engine = async || {
        let bytes = bytes.clone();
        RawEngine::start(move |_| Turn::answer(bytes.clone())).await
    };
    let engines = [engine().await, engine().await];
    let front = Front::start(LIMITS, "", &engines.each_ref().map(RawEngine::url)).await;
    (engines, front)
}

fn heard(engines: &[RawEngine]) -> usize {
    engines.iter().map(|engine| engine.heard().len()).sum()
}

#[tokio::test]
async fn a_reply_that_is_too_large_is_the_client_s_own_doing() {
    let long = generated("cmpl-1", &"x".repeat(70_000));
    let (engines, front) = with_replies(reply(200, "application/json", &long)).await;
    // More than open a breaker.
    for asked in 1..=8 {
        let reply = ask(&front, "x").await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "reply_too_large");
        assert!(error["message"].as_str().unwrap().contains("limits.engine_reply_size_max"));
        assert_eq!(heard(&engines), asked, "it is not generated again");
    }
    no_breaker_is_open(&front).await;
}

/// Replies that are larger than the default of `engine_reply_size_max` allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_of_seventy_mebibytes_to_many_clients_take_no_more_memory_than_requests_may() {
    const CLIENTS: usize = 40;
    const MEMORY_MIB: u64 = 192;
    const REPLY_BYTES: usize = 70 << 20;
    // Where the reply ends is said by the end of the connection alone.
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n\"";
    let post = async || {
        ScriptedServer::start(move |heard| match heard.is_inference() {
            false => ScriptedReply::json(200, "{}"),
            true => ScriptedReply::Endless {
                head: head.into(),
                piece: vec![b'x'; 64 << 10],
                max_bytes: REPLY_BYTES,
            },
        })
        .await
    };
    let posts = [post().await, post().await];
    let limits = format!("{{ request_memory_max: {MEMORY_MIB}MiB }}");
    let workers = posts.each_ref().map(ScriptedServer::url);
    let front = Front::measured(&limits, "retries: { decode: 1 }", &workers).await;
    let heard = || posts.iter().flat_map(ScriptedServer::heard);
    let asked = || heard().filter(|heard| heard.is_inference()).count();
    let before = memory(front.router.pid());
    reset_peak(front.router.pid());
    let alone = ask(&front, "x").await;
    assert_eq!((alone.status.as_u16(), asked()), (400, 1), "{}", alone.text());
    assert_eq!(alone.json()["error"]["code"], "reply_too_large");
    let body = completion("x");
    let all = join_all((0..CLIENTS).map(|_| front.http.post(COMPLETIONS, &body))).await;
    for reply in all {
        let code = reply.json()["error"]["code"].as_str().unwrap().to_owned();
        let is_refused = matches!((reply.status.as_u16(), &*code), (400, "reply_too_large"))
            || matches!((reply.status.as_u16(), &*code), (503, "overloaded"));
        assert!(is_refused, "{} {}", reply.status, reply.text());
    }
    // All that is held of replies is charged to `request_memory_max`; besides, each client has a
    // stream.
    let allowed_kib = (MEMORY_MIB << 10) + CLIENTS as u64 * HTTP1_STREAM_KIB + REST_KIB;
    let grown_kib = memory(front.router.pid()).peak_kib.saturating_sub(before.now_kib);
    assert!(grown_kib < allowed_kib, "{grown_kib} KiB, where {allowed_kib} are allowed");
    assert_eq!(asked(), CLIENTS + 1, "one attempt for each");
    assert_eq!(front.metric("splitrail_worker_leg_failures_total", &[]).await, 0.0);
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn an_event_that_is_too_large_is_the_client_s_own_doing() {
    let event = |text: &str| {
        let finish = generated("cmpl-1", text).replace("\"stop\"", "null");
        format!("data: {finish}\n\n")
    };
    let long = event(&"x".repeat(70_000));
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 2, "stream": true});
    let (engines, front) = with_replies(Canned::reply("text/event-stream", &long)).await;
    for asked in 1..=8 {
        let reply = front.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(heard(&engines), asked);
    }
    no_breaker_is_open(&front).await;
    let (_engines, front) =
        with_replies(Canned::reply("text/event-stream", &(event("a") + &long))).await;
    for _ in 0..8 {
        let events = front.http.stream(COMPLETIONS, &body).await.rest().await;
        assert!(events[1].contains("reply_too_large"), "{events:?}");
    }
    no_breaker_is_open(&front).await;
}

#[tokio::test]
async fn an_engine_that_says_too_much_of_itself_costs_neither_memory_nor_log() {
    const ASKED: usize = 5;
    let metrics = format!("# HELP {}\n", "x".repeat(48 << 20));
    let card = json!({"id": "\u{1b}[31m\n".repeat(10_000), "max_model_len": 2048});
    let models = json!({"data": vec![card; 20]}).to_string();
    for (path, text) in [("/metrics", metrics), ("/v1/models", models)] {
        let post = ScriptedServer::start(move |heard| match heard.target == path {
            true => ScriptedReply::json(200, &text),
            false => ScriptedReply::json(200, "{}"),
        })
        .await;
        // The router is ready with this one, whatever it makes of the other.
        let good = RawEngine::start(|_| Turn::answer("")).await;
        let workers = [post.url(), good.url()];
        let front = Front::start("{}", "health: { probe_interval: 100ms }", &workers).await;
        let before = memory(front.router.pid());
        eventually("it was asked several times", async || {
            let all = post.heard();
            all.iter().filter(|heard| heard.target == "/metrics").count() > ASKED
        })
        .await;
        let grown = memory(front.router.pid()).peak_kib.saturating_sub(before.now_kib);
        assert!(grown < 32 << 10, "{path}: {grown} KiB");
        let log = front.log();
        let longest = log.lines().map(str::len).max().unwrap_or_default();
        assert!(longest < 4 << 10, "{path}: a line of {longest} bytes");
        assert!(
            !log.contains('\u{1b}') || path == "/metrics",
            "{path}: what is no text is escaped"
        );
    }
}

#[tokio::test]
async fn replies_that_are_gathered_have_a_bound_in_common() {
    const CLIENTS: usize = 12;
    // All but the last byte comes, so that each reply is held as it is gathered.
    let whole = reply(200, "application/json", &generated("cmpl-1", &"x".repeat(2 << 20)));
    let (first, last) = whole.as_bytes().split_at(whole.len() - 1);
    let (first, last) = (first.to_vec(), last.to_vec());
    let solo = Solo::start("{ body_size_max: 65536, request_memory_max: 8388608 }", move |_| {
        ScriptedReply::Held { first: first.clone(), last: last.clone() }
    })
    .await;
    let body = json!({"model": "sim", "prompt": "x", "max_tokens": 2});
    let all = join_all((0..CLIENTS).map(|_| solo.http.post(COMPLETIONS, &body)));
    let shed = [("reason", "request_memory")];
    let release = async {
        eventually("some are refused, and others held", async || {
            let refused = solo.metric("splitrail_shed_total", &shed).await as usize;
            refused > 0 && refused + solo.post.open() == CLIENTS
        })
        .await;
        assert!(solo.metric("splitrail_request_memory_bytes", &[]).await <= 8_388_608.0);
        solo.post.release();
    };
    let (replies, ()) = futures_util::future::join(all, release).await;
    let refused = replies.iter().filter(|reply| reply.status == 503);
    for reply in refused.clone() {
        assert_eq!(reply.json()["error"]["code"], "overloaded");
        assert!(!reply.header("retry-after").is_empty());
    }
    let served = replies.iter().filter(|reply| reply.status == 200).count();
    assert!(served > 0, "those that fit are served");
    assert!(served + refused.count() == CLIENTS);
    assert_eq!(solo.metric("splitrail_worker_breaker_open", &[]).await, 0.0);
    eventually("all memory is given back", async || {
        solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
    })
    .await;
}
