//! The pictures of docs/guides/live-page.md: the page in front of a real router, with as many workers
//! as the text says. `SPLITRAIL_WRITE_IMAGES=1 cargo test -p splitrail-tests --features chromium
//! --test operations pictures` writes docs/images, after minutes of traffic that fill the charts.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use splitrail_sim::SimConfig;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::task::JoinSet;

use super::browser::{Browser, Screen};
use super::{PHONE, picture};

const WIDE: Screen = Screen { width: 1280, height: 900, dark: false };

fn is_for_the_manual() -> bool {
    std::env::var_os("SPLITRAIL_WRITE_IMAGES").is_some()
}

/// Where a picture goes.
fn place(name: &str) -> PathBuf {
    match is_for_the_manual() {
        true => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/images")).join(name),
        false => picture(name),
    }
}

/// Conversations, each turn of which continues the one before it.
async fn converse(client: Client, number: usize) {
    for turn in 0.. {
        let mut text = prompt(150 + number * 40, &format!("c{number}s{}w", turn / 6));
        for later in 0..turn % 6 {
            text.push_str(&prompt(30, &format!("c{number}t{}l{later}w", turn / 6)));
        }
        let mut body = completion(&text);
        body["stream"] = true.into();
        body["max_tokens"] = (20 + 7 * (turn % 5)).into();
        client.stream(COMPLETIONS, &body).await.rest().await;
        tokio::time::sleep(Duration::from_millis(40 * (1 + (number + turn) as u64 % 5))).await;
    }
}

/// Sends a prompt from the page twice, and takes a picture of what the page says of the second time.
async fn try_it(browser: &Browser) {
    let text = "Which of our maps show the old harbour? ".repeat(12);
    let send = format!(
        "document.getElementById('playground-prompt').value = {text:?}; \
         document.getElementById('playground-form').requestSubmit(); return 0"
    );
    browser.run(&send).await;
    browser.shows("#playground .note", " prompt tokens, 0 of them cached").await;
    browser.run(&send).await;
    eventually("the second time, the prompt is cached", async || {
        let note = browser.texts("#playground .note").await.concat();
        note.contains("prompt tokens") && !note.contains(", 0 of them cached")
    })
    .await;
    browser.shows("#why .candidates caption", "Candidates for the decode leg").await;
    browser.screenshot_of(".playground-panel, .why-panel", &place("live-page-try.png")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pictures_show_what_the_manual_says_of_them() {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/live-page.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    for said in [
        "![The live page in front of two prefill and two decode workers](../images/live-page.png)",
        "![A drained decode worker and a prefill worker that is down](../images/live-page-trouble.png)",
    ] {
        assert!(guide.contains(said), "{said}");
    }
    let mut cluster = Cluster::start(Spec {
        prefill: 2,
        decode: 2,
        policy: "{ kind: predicted_ttft }",
        model: "cache_loss_tracking: {}\nqueue: {}".into(),
        engine: |_, config: &mut SimConfig| {
            (config.prefill_us_per_token, config.decode_us_per_step) = (120, 12_000);
            config.transfer_us_per_block = 300;
        },
        ..Spec::default()
    })
    .await;
    let mut clients = JoinSet::new();
    for number in 0..6 {
        clients.spawn(converse(cluster.http.clone(), number));
    }
    let browser = Browser::start().await;
    browser.set_screen(WIDE).await;
    browser.open(&format!("http://{}/", cluster.running.addresses.admin)).await;
    for pool in ["2 of 2 serving"; 2] {
        browser.shows(".cluster .pool", pool).await;
    }
    eventually("all figures are there, and where time goes", async || {
        let values = browser.texts(".tile .value, #stages dd").await;
        let known = values.iter().filter(|value| *value != "\u{2013}").count();
        known == values.len() && known >= 13
    })
    .await;
    browser.shows("#stages-note", "Mean of the last minute, hand-off ").await;
    if is_for_the_manual() {
        let filled = Instant::now() + Duration::from_secs(150);
        tokio::time::sleep_until(filled.into()).await;
    }
    browser.screenshot(&place("live-page.png"), 1180).await;
    try_it(&browser).await;

    cluster.admin.post_with("/admin/workers/d1/drain", &[], "").await;
    browser.shows("#workers tr[data-state=draining]", "an operator drains it").await;
    let p1 = cluster.engines.iter().position(|(name, _)| name == "p1").unwrap();
    cluster.engines.remove(p1).1.shutdown().await;
    browser.shows("#workers tr[data-state=down]", "p1").await;
    browser.shows(".node[data-state=down]", "down").await;
    browser.screenshot(&place("live-page-trouble.png"), 1180).await;
    browser.set_screen(Screen { dark: true, ..WIDE }).await;
    browser.screenshot(&place("live-page-dark.png"), 1180).await;
    browser.set_screen(PHONE).await;
    browser.screenshot(&place("live-page-phone.png"), 1400).await;
    assert_eq!(browser.log().await, [""; 0]);
    clients.shutdown().await;
}
