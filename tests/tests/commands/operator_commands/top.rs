//! `top` on a real terminal, and as text.

use splitrail_tests::Client;
use splitrail_tests::binary::built;
use splitrail_tests::cluster::eventually;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::proc::signal;
use splitrail_tests::pty::OnTerminal;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};

use super::support::{Routers, run};

const SIZE: (u16, u16) = (80, 24);

fn start(admins: &str, env: &[(&str, &str)]) -> OnTerminal {
    OnTerminal::start(&built("splitrail"), &["top", "--admin", admins], env, SIZE)
}

#[tokio::test]
async fn top_shows_the_cluster_as_it_changes_and_leaves_the_terminal_as_it_was() {
    let routers = Routers::start(1).await;
    let mut top = start(&routers.admins(), &[]);
    for text in ["prefill pool, 2 of 2 serving", "decode pool, 2 of 2 serving", "q quit"] {
        top.until_shown(text).await;
    }
    assert!(!top.is_restored());
    let admin = Client::new(routers.routers[0].admin);
    admin.post_with("/admin/workers/d1/drain", &[], "").await;
    top.until_shown("decode pool, 1 of 2 serving").await;
    top.until_shown("! d1: draining: an operator drains it").await;
    top.press("s");
    top.until_shown("sorted by requests").await;
    top.press("p");
    top.until_shown("PAUSED").await;
    admin.delete("/admin/workers/d1/drain").await;
    top.press("s");
    top.until_shown("sorted by prefill").await;
    assert!(top.rows().iter().any(|row| row.contains("1 of 2 serving")), "it is paused");
    top.press("p");
    top.until_hidden("! d1: draining").await;
    top.press("m");
    top.until_shown("splitrail top  sim").await;
    top.resize((120, 40));
    eventually("the keys are in the last row of the larger screen", async || {
        top.rows()[39].starts_with("q quit")
    })
    .await;
    top.press("q");
    assert_eq!(top.ended().await.code(), Some(0));
    top.until_restored().await;
}

#[tokio::test]
async fn top_restores_the_terminal_after_ctrl_c_and_after_a_signal() {
    let routers = Routers::start(1).await;
    for ends in ["\u{3}", "TERM"] {
        let mut top = start(&routers.admins(), &[("NO_COLOR", "1")]);
        top.until_shown("prefill pool").await;
        // A colour of the foreground, in any of its forms.
        let output = top.output();
        assert!(!["[31m", "[32m", "[38;"].iter().any(|colour| output.contains(colour)));
        match ends {
            "TERM" => {
                let children = format!("/proc/{0}/task/{0}/children", top.pid());
                let child = std::fs::read_to_string(children).unwrap();
                // `setsid` may have become the program.
                let pid = child.trim().parse().unwrap_or(top.pid());
                signal(pid, ends);
            }
            key => top.press(key),
        }
        assert_eq!(top.ended().await.code(), Some(0), "{ends}");
        top.until_restored().await;
    }
}

#[tokio::test]
async fn top_of_an_unknown_model_ends_with_an_error_that_names_the_known_ones() {
    let routers = Routers::start(2).await;
    let arguments = ["top", "--model", "typo", "--admin", &routers.admins()];
    let mut top = OnTerminal::start(&built("splitrail"), &arguments, &[], SIZE);
    assert_eq!(top.ended().await.code(), Some(65));
    top.until_restored().await;
    eventually("the models are named", async || {
        top.output().contains("no router serves a model `typo`; there are: sim")
    })
    .await;
}

#[tokio::test]
async fn top_follows_a_router_again_that_was_gone() {
    let mut routers = Routers::start(2).await;
    let gone = routers.name(1);
    let mut top = start(&routers.admins(), &[]);
    top.until_shown("prefill pool, 2 of 2 serving").await;
    routers.routers.pop().unwrap().end();
    top.until_shown(&format!("{gone}  nothing listens at {gone}")).await;
    assert!(top.rows().iter().any(|row| row.contains("2 of 2 serving")), "of the other router");
    top.press("q");
    assert_eq!(top.ended().await.code(), Some(0));
}

#[tokio::test]
async fn top_prints_one_frame_as_text() {
    let routers = Routers::start(2).await;
    let http = Client::new(routers.routers[0].http);
    for turn in 0..3 {
        let body = completion(&prompt(40, "top"));
        assert_eq!(http.post(COMPLETIONS, &body).await.status, 200, "{turn}");
    }
    let once = run(&["top", "--once", "--admin", &routers.admins()]).await;
    assert_eq!(once.code, 0, "{once:?}");
    assert!(once.stdout.contains("prefill pool, 2 of 2 serving"), "{once:?}");
    assert!(!once.stdout.contains('\u{1b}'), "{once:?}");
    let decisions = once.stdout.lines().filter(|line| line.contains(" ok ")).count();
    assert_eq!(decisions, 3, "{once:?}");
    // The whole cluster is there, however low the terminal would be.
    for id in ["p0", "p1", "d0", "d1"] {
        assert!(once.stdout.lines().any(|line| line.trim_start().starts_with(id)), "{once:?}");
    }
}

#[tokio::test]
async fn top_without_a_terminal_asks_for_one_frame() {
    let ran = run(&["top"]).await;
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.stderr.contains("--once"), "{ran:?}");
}

#[tokio::test]
async fn top_reports_a_router_that_is_not_there() {
    let routers = Routers::start(1).await;
    let port = HeldPort::take();
    let free = port.address();
    let once = run(&["top", "--once", "--admin", &format!("{free},{}", routers.admins())]).await;
    assert_eq!(once.code, 69, "{once:?}");
    assert!(once.stdout.contains("prefill pool"), "{once:?}");
    assert!(once.stdout.contains(&format!("nothing listens at {free}")), "{once:?}");
}
