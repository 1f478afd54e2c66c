//! Routers that cannot be reached, or are none.

use tokio::net::TcpListener;

use splitrail_tests::ports::HeldPort;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::unanswering::Unanswering;

use super::support::{Routers, run};

#[tokio::test]
async fn routers_that_cannot_be_reached_do_not_hide_the_others() {
    let routers = Routers::start(1).await;
    // One accepts connections and never replies, one does not even accept.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = (silent.local_addr().unwrap().to_string(), silent);
    let unanswering = Unanswering::start().await;
    let admins = format!("{},{},{}", routers.admins(), silent.0, unanswering.address());
    let limit = ["--admin-timeout", "3s"];
    let status = run(&[&["status", "--admin", &admins][..], &limit].concat()).await;
    assert_eq!(status.code, 69, "{status:?}");
    assert!(status.line(&routers.name(0)).contains("ready"), "{status:?}");
    assert!(status.line(&silent.0).contains("not reached"), "{status:?}");
    assert_eq!(status.stdout.matches("did not reply within 3s").count(), 2, "{status:?}");
    let listed = run(&[&["workers", "--admin", &admins][..], &limit].concat()).await;
    assert_eq!(listed.code, 69, "{listed:?}");
    assert!(listed.stdout.contains("d1") && listed.stdout.contains("did not reply"), "{listed:?}");
    let drained = run(&[&["drain", "d0", "--admin", &admins][..], &limit].concat()).await;
    assert_eq!(drained.code, 75, "{drained:?}");
    drained.line("incomplete: d0 is drained on 1 of 3 routers");
}

#[tokio::test]
async fn errors_say_what_is_wrong_with_an_address() {
    let routers = Routers::start(1).await;
    let http = routers.routers[0].http.to_string();
    let other = ScriptedServer::start(|_| ScriptedReply::json(200, "{\"a\": 1}")).await;
    let other = other.url();
    let free = HeldPort::take();
    for (admin, what) in [
        (&*free.address().to_string(), "nothing listens at"),
        (&*http, "is not an admin listener of this version"),
        (&*other, "cannot be read"),
        (&format!("https://{}", routers.name(0)), "does not speak TLS"),
    ] {
        let arguments = ["explain", "--request-id", "x", "--admin", admin];
        let ran = run(&arguments).await;
        assert_eq!(ran.code, 69, "{admin}: {ran:?}");
        assert!(ran.stderr.contains(what) && ran.stderr.contains("hint: "), "{admin}: {ran:?}");
    }
}

#[tokio::test]
async fn a_mistyped_command_is_answered_with_the_one_that_was_meant() {
    let ran = run(&["statsu"]).await;
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.stderr.contains("'status'"), "{ran:?}");
}
