//! `drain` and `undrain` on all routers, and the wait.

use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::json;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::proc::signal;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};

use super::support::{Ran, Routers, command, run};

/// A command that still runs, and what it has written to stderr so far.
struct Running {
    child: Option<Child>,
    stderr: Arc<Mutex<String>>,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut child =
            command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = Arc::new(Mutex::new(String::new()));
        let (mut from, shared) = (child.stderr.take().unwrap(), Arc::clone(&stderr));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut buffer) {
                shared.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
        });
        Self { child: Some(child), stderr }
    }

    async fn until_said(&self, text: &str) {
        eventually(&format!("the command says {text:?}"), async || {
            self.stderr.lock().unwrap().contains(text)
        })
        .await;
    }

    fn signal(&self, name: &str) {
        signal(self.child.as_ref().unwrap().id(), name);
    }

    async fn ended(mut self) -> Ran {
        let child = self.child.take().unwrap();
        let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await;
        Ran::new(&output.unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself already.
            let _gone = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// Routers that have counted their workers at different times may have given one id twice.
#[tokio::test]
async fn an_id_that_means_different_engines_is_not_drained() {
    let routers = Routers::start(2).await;
    let text = std::fs::read_to_string(routers.config(1)).unwrap();
    let swapped =
        text.replace("id: d0", "id: d2").replace("id: d1", "id: d0").replace("id: d2", "id: d1");
    std::fs::write(routers.config(1), swapped).unwrap();
    assert_eq!(run(&["reload", "--admin", &routers.admins()]).await.code, 0);
    let refused = run(&["drain", "d0", "--admin", &routers.admins()]).await;
    assert_eq!(refused.code, 65, "{refused:?}");
    assert!(refused.stderr.contains("d0 is not the same engine on all routers"), "{refused:?}");
    for place in 0..2 {
        assert_ne!(routers.state(place, "d0").await, "draining");
    }
    assert_eq!(run(&["drain", "d0", "--admin", &routers.name(0)]).await.code, 0);
}

#[tokio::test]
async fn a_worker_is_drained_on_all_routers_and_taken_back() {
    let routers = Routers::start(2).await;
    let drained = run(&["drain", "d0", "--admin", &routers.admins()]).await;
    assert_eq!(drained.code, 0, "{drained:?}");
    for place in 0..2 {
        let line = format!("{}: d0 is draining, no requests", routers.name(place));
        assert_eq!(drained.line(&routers.name(place)), line);
        assert_eq!(routers.state(place, "d0").await, "draining");
    }
    let again = run(&["drain", "d0", "--admin", &routers.admins(), "--json"]).await;
    assert_eq!(again.code, 0, "{again:?}");
    assert_eq!(again.json()["replicas"][1]["state"], "draining");
    let back = run(&["undrain", "d0", "--model", "sim", "--admin", &routers.admins()]).await;
    assert_eq!(back.code, 0, "{back:?}");
    for place in 0..2 {
        assert_ne!(routers.state(place, "d0").await, "draining");
    }
}

#[tokio::test]
async fn a_drain_that_is_incomplete_says_where_it_was_not_made() {
    let mut routers = Routers::start(3).await;
    let admins = routers.admins();
    let name = routers.name(2);
    routers.routers.pop().unwrap().end();
    let drained = run(&["drain", "d0", "--admin", &admins]).await;
    assert_eq!(drained.code, 75, "{drained:?}");
    assert!(drained.line(&name).contains("nothing listens"), "{drained:?}");
    assert!(drained.line("incomplete: d0 is drained on 2 of 3").contains("again"), "{drained:?}");
    assert_eq!(routers.state(1, "d0").await, "draining");
    let unknown = run(&["drain", "d7", "--admin", &routers.admins()]).await;
    assert_eq!(unknown.code, 65, "{unknown:?}");
    assert!(unknown.stdout.contains("there is no worker d7"), "{unknown:?}");
    assert!(unknown.stdout.contains("splitrail workers"), "{unknown:?}");
}

#[tokio::test]
async fn a_wait_ends_when_no_router_has_requests_on_the_worker() {
    let routers = Routers::start(2).await;
    let (events, busy) = routers.endless(1).await;
    let waiting = Running::start(&["drain", &busy, "--wait", "--admin", &routers.admins()]);
    let said = format!("waiting for 1 request ({}: 1)", routers.name(1));
    waiting.until_said(&said).await;
    drop(events);
    let ended = waiting.ended().await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let proved = format!("{busy} has no requests of any router: its engine can be stopped");
    assert_eq!(ended.line(&busy), proved, "{ended:?}");
}

#[tokio::test]
async fn a_wait_for_a_prefill_worker_lasts_until_its_hand_offs_are_fetched() {
    let routers = Routers::start(1).await;
    // The prefill has ended; the request that has fetched its hand-off is still in flight, and the
    // router does not say that it has.
    let (events, _busy) = routers.endless(0).await;
    let workers = routers.workers(0).await;
    assert!(workers.iter().all(|worker| worker["role"] != "prefill" || worker["requests"] == 0));
    let arguments = ["drain", "p0", "--wait", "2s", "--admin", &routers.admins()];
    let late = run(&arguments).await;
    assert_eq!(late.code, 75, "{late:?}");
    assert!(late.stdout.contains("hand-offs from p0 may still be fetched"), "{late:?}");
    drop(events);
    let ended = run(&["drain", "p0", "--wait", "--admin", &routers.admins()]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
}

#[tokio::test]
async fn a_wait_says_that_the_last_worker_still_gets_requests() {
    let routers = Routers::start(1).await;
    assert_eq!(run(&["drain", "d0", "--admin", &routers.admins()]).await.code, 0);
    let last = run(&["drain", "d1", "--wait", "--admin", &routers.admins()]).await;
    assert_eq!(last.code, 0, "{last:?}");
    assert!(last.stderr.contains("no other worker can take its requests"), "{last:?}");
}

#[tokio::test]
async fn a_wait_says_that_the_last_prefill_worker_gets_no_requests() {
    let routers = Routers::start(1).await;
    assert_eq!(run(&["drain", "p0", "--admin", &routers.admins()]).await.code, 0);
    let last = run(&["drain", "p1", "--wait", "--admin", &routers.admins()]).await;
    assert_eq!(last.code, 0, "{last:?}");
    assert!(last.stderr.contains("no other prefill worker is left"), "{last:?}");
    assert!(!last.stderr.contains("still gets them"), "{last:?}");
}

#[tokio::test]
async fn a_wait_that_takes_too_long_leaves_the_worker_drained() {
    let routers = Routers::start(1).await;
    let (_events, busy) = routers.endless(0).await;
    let late = run(&["drain", &busy, "--wait", "3s", "--admin", &routers.admins()]).await;
    assert_eq!(late.code, 75, "{late:?}");
    assert!(late.stdout.contains(&format!("still 1 request on {busy}")), "{late:?}");
    assert_eq!(routers.state(0, &busy).await, "draining");
}

#[tokio::test]
async fn a_router_that_is_killed_during_the_wait_is_reported_and_not_taken_for_proved() {
    let mut routers = Routers::start(2).await;
    let admins = routers.admins();
    let (events, busy) = routers.endless(1).await;
    let waiting = Running::start(&["drain", &busy, "--wait", "--admin", &admins]);
    waiting.until_said("waiting for 1 request").await;
    let killed = routers.name(1);
    routers.routers.pop().unwrap().end();
    drop(events);
    // The reason is reported at once, before the wait has ended.
    waiting.until_said(&format!("{killed}: nothing listens at {killed}")).await;
    let ended = waiting.ended().await;
    assert_eq!(ended.code, 75, "{ended:?}");
    let of = |name: &str, text: &str| {
        ended.stdout.lines().any(|line| line.starts_with(name) && line.contains(text))
    };
    assert!(of(&killed, "not proved: nothing listens"), "{ended:?}");
    assert!(of(&routers.name(0), &format!("no requests on {busy}")), "{ended:?}");
    assert!(ended.line("incomplete: it is proved for 1 of 2").contains(&busy), "{ended:?}");
}

#[tokio::test]
async fn ctrl_c_during_the_wait_leaves_the_worker_drained_and_says_so() {
    let routers = Routers::start(1).await;
    let (_events, busy) = routers.endless(0).await;
    let waiting = Running::start(&["drain", &busy, "--wait", "--admin", &routers.admins()]);
    waiting.until_said("waiting for 1 request").await;
    waiting.signal("INT");
    let ended = waiting.ended().await;
    assert_eq!(ended.code, 130, "{ended:?}");
    assert!(ended.line("interrupted").contains(&format!("{busy} stays drained")), "{ended:?}");
    assert_eq!(routers.state(0, &busy).await, "draining");
}

#[tokio::test]
async fn a_wait_notices_that_the_worker_was_undrained() {
    let routers = Routers::start(1).await;
    let (_events, busy) = routers.endless(0).await;
    let waiting = Running::start(&["drain", &busy, "--wait", "--admin", &routers.admins()]);
    waiting.until_said("waiting for 1 request").await;
    let admin = Client::new(routers.routers[0].admin);
    assert_eq!(admin.delete(&format!("/admin/workers/{busy}/drain")).await.status, 200);
    let ended = waiting.ended().await;
    assert_eq!(ended.code, 75, "{ended:?}");
    assert!(ended.stdout.contains(&format!("{busy} is back in service")), "{ended:?}");
}

#[tokio::test]
async fn a_wait_proves_nothing_for_a_router_that_does_not_say_which_requests_are_in_flight() {
    let worker = json!({ "model": "sim", "id": "p0", "role": "prefill", "state": "draining" });
    let router = ScriptedServer::start(move |request| match &*request.target {
        "/admin/workers/p0/drain" => {
            ScriptedReply::json(200, &json!({"worker": worker}).to_string())
        }
        "/admin/workers" => ScriptedReply::json(200, &json!({"workers": [worker]}).to_string()),
        _ => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
    })
    .await;
    let late = run(&["drain", "p0", "--wait", "2s", "--admin", &router.url()]).await;
    assert_eq!(late.code, 75, "{late:?}");
    assert!(late.stdout.contains("hand-offs from p0 may still be fetched"), "{late:?}");
    assert!(!late.stdout.contains("can be stopped"), "{late:?}");
    let asked = router.heard().iter().any(|request| request.target == "/admin/requests");
    assert!(asked, "the wait has not come to the requests in flight");
}
