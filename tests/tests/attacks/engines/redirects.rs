//! Engines that send the router elsewhere: it goes nowhere, and says that the engine failed.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;

use super::{COMPLETIONS, completion};

/// All that have a location which a client may follow.
const STATUSES: [u16; 5] = [301, 302, 303, 307, 308];

/// Another host's port, as far as a test can have one: it accepts, and is never connected to.
struct Elsewhere(TcpListener);

impl Elsewhere {
    fn new() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self(listener)
    }

    /// The forms of a location that lead to it, and one that leads to another path of the engine.
    fn locations(&self) -> [String; 3] {
        let at = self.0.local_addr().unwrap();
        [format!("http://{at}{COMPLETIONS}"), format!("//{at}{COMPLETIONS}"), "/elsewhere".into()]
    }

    /// The system accepts connections before the listener does, so that none is missed.
    fn was_never_connected_to(&self) {
        match self.0.accept() {
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            Ok((_, peer)) => panic!("{peer} followed a redirect"),
        }
    }
}

/// A status and a location.
type Redirect = Arc<Mutex<Option<(u16, String)>>>;

/// An engine that answers inference, and polls, with a redirect if there is one.
async fn redirecting(inference: &Redirect, polls: &Redirect) -> ScriptedServer {
    let (inference, polls) = (Arc::clone(inference), Arc::clone(polls));
    ScriptedServer::start(move |heard| {
        let is_inference = heard.is_inference();
        let redirect = if is_inference { &inference } else { &polls }.lock().unwrap();
        match (&*redirect, is_inference) {
            (Some((status, location)), _) => answer(*status, location),
            (None, true) => whole_reply(),
            (None, false) => ScriptedReply::json(200, "{}"),
        }
    })
    .await
}

fn answer(status: u16, location: &str) -> ScriptedReply {
    let head = format!("HTTP/1.1 {status} X\r\nlocation: {location}\r\n");
    ScriptedReply::Bytes((head + "content-length: 0\r\nconnection: close\r\n\r\n").into_bytes())
}

/// Each request that the engine got was for a path of the router's choice.
fn asks_for_no_other_path(post: &ScriptedServer) {
    assert!(post.heard().iter().all(|heard| !heard.target.contains("elsewhere")));
}

#[tokio::test]
async fn redirects_of_an_engine_lead_nowhere() {
    let elsewhere = Elsewhere::new();
    let (inference, polls) = (Redirect::default(), Redirect::default());
    let post = redirecting(&inference, &polls).await;
    let front = Front::start("{}", "breaker: { failures: 0 }", &[post.url()]).await;
    for status in STATUSES {
        for location in elsewhere.locations() {
            *inference.lock().unwrap() = Some((status, location.clone()));
            for streamed in [false, true] {
                let mut body = completion("x");
                body["stream"] = streamed.into();
                let reply = front.http.post(COMPLETIONS, &body).await;
                assert_eq!(reply.status, 502, "{status} {location}: {}", reply.text());
                // Where the engine wanted the router to go is not the client's affair.
                assert_eq!(reply.header("location"), "");
                assert!(!reply.text().contains(&location), "{}", reply.text());
            }
        }
    }
    *inference.lock().unwrap() = None;
    assert_eq!(front.http.post(COMPLETIONS, &completion("x")).await.status, 200);
    let [location, ..] = elsewhere.locations();
    *polls.lock().unwrap() = Some((307, location));
    let polled = || post.heard().iter().filter(|heard| !heard.is_inference()).count();
    let before = polled();
    eventually("the engine is polled twice more", async || polled() >= before + 2).await;
    elsewhere.was_never_connected_to();
    asks_for_no_other_path(&post);
}

#[tokio::test]
async fn redirects_of_a_prefill_engine_lead_nowhere() {
    let elsewhere = Elsewhere::new();
    let (inference, none) = (Redirect::default(), Redirect::default());
    let (prefill, decode) = (redirecting(&inference, &none).await, redirecting(&none, &none).await);
    let workers = [("prefill", prefill.url()), ("decode", decode.url())];
    let flow = "flow: prefill_first\n    connector: nixl";
    let front = Front::with_flow("{}", flow, "breaker: { failures: 0 }", &workers).await;
    for status in STATUSES {
        for location in elsewhere.locations() {
            *inference.lock().unwrap() = Some((status, location));
            let reply = front.http.post(COMPLETIONS, &completion("x")).await;
            assert_eq!(reply.status, 200, "the decode engine prefills: {}", reply.text());
        }
    }
    let asked = prefill.heard().iter().filter(|heard| heard.is_inference()).count();
    assert!(asked >= STATUSES.len() * elsewhere.locations().len(), "{asked}");
    elsewhere.was_never_connected_to();
    asks_for_no_other_path(&prefill);
}
