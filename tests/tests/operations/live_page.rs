//! The live page in a real browser: it shows what happens to a cluster, runs nothing that others
//! have named, and holds no more memory tomorrow than today.

use std::path::PathBuf;

use serde_json::{Value, json};
use splitrail_config::keys::OperatorRole;
use splitrail_tests::cluster::eventually;
use splitrail_tests::live::LiveStream;
use splitrail_tests::process::Processes;
use splitrail_tests::tenants::{self, Keys};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

mod browser;
mod pictures;
mod stage;

use browser::{Browser, Screen};
use stage::Stage;

const CONTRAST: &str = include_str!("live_page/contrast.js");

const PHONE: Screen = Screen { width: 360, height: 740, dark: false };

/// The folder of screenshots, for people to look at.
fn picture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("live-page").join(name)
}

async fn is_legible(browser: &Browser, where_: &str) {
    let found = browser.run(CONTRAST).await;
    assert!(found["seen"].as_u64().unwrap() > 40, "{where_}: {found}");
    assert_eq!(found["poor"], json!([]), "{where_}");
}

async fn fits(browser: &Browser) {
    let widths = "return [document.documentElement.scrollWidth, innerWidth]";
    let widths = browser.run(widths).await;
    assert!(widths[0].as_f64() <= widths[1].as_f64(), "it scrolls sideways: {widths}");
}

#[tokio::test]
async fn the_page_shows_workers_a_drain_a_broken_worker_and_a_decision() {
    let mut cluster = Processes::start(&["p0", "p1", "d0", "d1"], |_| Vec::new(), "{}").await;
    let browser = Browser::start().await;
    browser.set_screen(Screen::DESKTOP).await;
    browser.open(&format!("http://{}/", cluster.router.told("admin"))).await;
    browser.shows("#ready", "Ready").await;
    browser.shows(".cluster .pool", "2 of 2 serving").await;
    assert_eq!(browser.texts("#workers tbody th .name").await, ["p0", "p1", "d0", "d1"]);
    browser.shows("#decisions .empty", "No decisions yet").await;

    for turn in 0..12 {
        let mut body = completion(&prompt(60, &format!("s{}", turn % 3)));
        body["stream"] = (turn % 2 == 0).into();
        let headers = [("x-request-id", &*format!("asked-{turn}"))];
        let reply = cluster.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
        assert_eq!(reply.status, 200);
    }
    browser.shows("#decisions tbody tr:first-child", "asked-11").await;
    // Figures are those of the last seconds: there are streams until they are seen.
    eventually("flows and figures are shown", async || {
        let mut body = completion(&prompt(60, "s0"));
        body["stream"] = true.into();
        cluster.http.stream(COMPLETIONS, &body).await.rest().await;
        let flows = "return document.querySelectorAll('.flow').length";
        let values = browser.texts(".legend dd, .tile .value").await;
        browser.run(flows).await.as_u64().unwrap() >= 2
            && values.len() > 12
            && values.iter().all(|value| value != "\u{2013}")
    })
    .await;
    browser.click("#decisions tbody tr:first-child button").await;
    browser.shows("#why .candidates caption", "Candidates for the prefill leg").await;
    browser.shows("#why .candidates", "chosen").await;
    browser.shows("#why .facts", "prefill ").await;
    browser.screenshot(&picture("healthy.png"), 900).await;

    // What is typed goes through the front door, and its way is explained.
    let send = "document.getElementById('playground-prompt').value = 'typed '.repeat(80); \
                document.getElementById('playground-form').requestSubmit(); return 0";
    browser.run(send).await;
    browser.shows("#playground .note", " prompt tokens, 0 of them cached").await;
    browser.run(send).await;
    eventually("the second time, the prompt is cached", async || {
        let note = browser.texts("#playground .note").await.concat();
        note.contains("prompt tokens") && !note.contains(", 0 of them cached")
    })
    .await;
    browser.shows("#why .candidates caption", "Candidates for the decode leg").await;
    browser.shows("#attention-note", "All is well").await;

    cluster.admin.post_with("/admin/workers/d1/drain", &[], "").await;
    browser.shows("#workers tr[data-state=draining]", "an operator drains it").await;
    browser.shows("#attention", "): draining: an operator drains it").await;
    browser.shows(".node[data-state=draining]", "d1").await;
    cluster.engines[1].kill();
    browser.shows("#workers tr[data-state=down]", "p1").await;
    browser.shows(".node[data-state=down]", "down").await;
    browser.screenshot(&picture("trouble.png"), 900).await;
    for dark in [false, true] {
        browser.set_screen(Screen { dark, ..Screen::DESKTOP }).await;
        is_legible(&browser, if dark { "dark" } else { "light" }).await;
    }
    browser.screenshot(&picture("dark.png"), 900).await;
    browser.set_screen(PHONE).await;
    fits(&browser).await;
    is_legible(&browser, "narrow").await;
    browser.screenshot(&picture("narrow.png"), 1600).await;
    assert_eq!(browser.log().await, [""; 0]);

    // A router that is gone is told with the time of the last figures, which stay.
    cluster.router.kill();
    browser.shows("#link-text", "No data since").await;
    browser.shows("#workers tbody th .name", "d0").await;
    browser.set_screen(Screen::DESKTOP).await;
    browser.screenshot(&picture("disconnected.png"), 900).await;
    let log = browser.log().await;
    let is_network = |line: &String| line.contains("net::ERR_");
    assert!(log.iter().all(is_network), "{log:?}");
}

/// A snapshot of a real router, as a test may change it.
async fn snapshot(cluster: &Cluster) -> Value {
    assert_eq!(cluster.http.post(COMPLETIONS, &completion(&prompt(40, "a"))).await.status, 200);
    let mut live = LiveStream::open(&cluster.admin, &[]).await;
    live.until(|seen| seen["decisions"][0]["outcome"] == "ok").await
}

#[tokio::test]
async fn names_with_markup_are_text_and_run_nothing() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut hostile = snapshot(&cluster).await;
    let name = |kind: &str| {
        format!(
            "{kind}\"'><img src=x onerror=\"document.title='run'\"><script>document.title='run'\
             </script><svg onload=alert(1)>\n\u{202e}&lt;javascript:alert(1)"
        )
    };
    let model = &mut hostile["models"][0];
    model["name"] = name("model").into();
    model["failures_per_s"] = json!({ name("outcome"): 1.0 });
    model["results_per_s"] = json!({ "failed": 1.0 });
    for (at, id) in ["p0", "p1", "d0", "d1"].iter().enumerate() {
        model["workers"][at]["id"] = name(id).into();
        model["workers"][at]["state_why"] = name("why").into();
        model["workers"][at]["state"] = "down".into();
    }
    model["flows"] = json!([
        {"prefill_worker": name("p0"), "decode_worker": name("d1"), "requests_per_s": 2.0},
    ]);
    let decision = &mut hostile["decisions"][0];
    for (member, kind) in [
        ("request_id", "request"),
        ("model", "model"),
        ("decode_worker", "d0"),
        ("runner_up", "d1"),
    ] {
        decision[member] = name(kind).into();
    }
    hostile["needs_attention"] = json!([{
        "kind": "slow", "is_note": false, "model": name("model"), "workers": [name("p0")],
        "message": name("reason"), "advice": name("advice"),
    }]);
    let mut second = hostile["models"][0].clone();
    second["name"] = name("other").into();
    hostile["models"].as_array_mut().unwrap().push(second);

    let stage = Stage::start(cluster.admin.clone()).await;
    let browser = Browser::start().await;
    browser.set_screen(Screen::DESKTOP).await;
    browser.open(&stage.url()).await;
    stage.send(vec![hostile]);
    let shown = "p0\"'><img src=x";
    for place in ["#workers tbody th", ".node-id"] {
        browser.shows(place, shown).await;
    }
    browser.shows("#decisions tbody", "request\"'><img").await;
    for text in ["p0", "reason", "advice"] {
        browser.shows("#attention", &format!("{text}\"'><img")).await;
    }
    browser.shows("#tiles", "outcome\"'><img").await;
    // What cannot be seen, or turns text round, is written out.
    browser.shows("#workers tbody th", "\\u{a}\\u{202e}&lt;").await;
    browser.click("#decisions button").await;
    browser.shows("#why", "No decision of request\"'><img").await;
    let made = "return document.querySelectorAll('img, svg [onload], script:not([src])').length";
    assert_eq!(browser.run(made).await, 0);
    let title = browser.run("return document.title").await;
    assert!(title.as_str().unwrap().contains("model\"'><img"), "{title}");
    // The history of a model that the router does not have is a 404, which the browser logs.
    let log = browser.log().await;
    let is_404 = |line: &String| line.contains("/admin/live/history") && line.contains("404");
    assert!(log.iter().all(is_404), "{log:?}");
}

/// Prefill legs take tokens from other workers, by read-back and by peer fetches.
#[tokio::test]
async fn the_chart_of_prefill_legs_has_what_was_transferred() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut shown = snapshot(&cluster).await;
    let tokens = json!({ "cached": 10.0, "transferred": 30.0, "computed": 50.0 });
    shown["models"][0]["prompt_tokens_per_s"] = json!({ "prefill": tokens, "decode": tokens });
    let stage = Stage::start(cluster.admin.clone()).await;
    let browser = Browser::start().await;
    browser.open(&stage.url()).await;
    stage.send(vec![shown]);
    for chart in ["#chart-decode", "#chart-prefill"] {
        let legend = async |part: &str| browser.texts(&format!("{chart} .legend {part}")).await;
        eventually(&format!("{chart} has figures"), async || {
            let figures = legend("dd").await;
            !figures.is_empty() && figures.iter().all(|figure| figure != "\u{2013}")
        })
        .await;
        assert_eq!(legend("dt").await, ["Computed", "Transferred", "Cached"], "{chart}");
        let figures = legend("dd").await;
        let of = |place: usize, value: &str| figures[place].starts_with(value);
        assert!(of(0, "50") && of(1, "30") && of(2, "10"), "{chart}: {figures:?}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_no_failure() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut shown = snapshot(&cluster).await;
    let model = &mut shown["models"][0];
    model["requests_per_s"] = 7.0.into();
    model["failures_per_s"] = json!({ "cancelled": 3.0, "engine_rejected": 1.0 });
    model["results_per_s"] = json!({ "ok": 3.0, "cancelled": 3.0, "invalid": 1.0 });
    let mut failing = shown.clone();
    failing["models"][0]["failures_per_s"]["no_worker"] = 0.5.into();
    failing["models"][0]["results_per_s"]["failed"] = 0.5.into();
    let mut alone = failing.clone();
    alone["models"][0]["failures_per_s"] = json!({ "cancelled": 3.0, "no_worker": 0.5 });
    alone["models"][0]["results_per_s"] = json!({ "cancelled": 3.0, "failed": 0.5 });
    let stage = Stage::start(cluster.admin.clone()).await;
    let browser = Browser::start().await;
    browser.open(&stage.url()).await;
    let bad = "return document.querySelector('#tiles [data-bad]')?.textContent ?? ''";
    stage.send(vec![shown]);
    browser.shows("#tiles", "4.0 cancelled or refused").await;
    assert_eq!(browser.run(bad).await, "");
    stage.send(vec![failing]);
    browser.shows("#tiles .tile:last-child", "failed").await;
    assert_eq!(browser.run(bad).await, "Failures/s0.50failed");
    stage.send(vec![alone]);
    browser.shows("#tiles", "no worker").await;
    assert_eq!(browser.run(bad).await, "Failures/s0.50no worker");
}

/// Snapshots in which workers come and go, and every request is another.
fn changing(base: &Value, numbers: std::ops::Range<u64>) -> Vec<Value> {
    let one = |number: u64| {
        let mut next = base.clone();
        next["time_unix_ms"] = (base["time_unix_ms"].as_u64().unwrap() + number * 1000).into();
        next["models"][0]["ttft_ms"] = json!({"p50": number % 97, "p90": number % 89, "p99": 99});
        let workers = next["models"][0]["workers"].as_array_mut().unwrap();
        for at in 0..number % 7 {
            let mut worker = workers[0].clone();
            worker["id"] = format!("passing-{}-{at}", number / 3).into();
            workers.push(worker);
        }
        next["models"][0]["flows"] = json!([{
            "prefill_worker": "p0", "decode_worker": format!("d{}", number % 2),
            "requests_per_s": number % 13,
        }]);
        let decision = |at: u64| {
            let mut decision = base["decisions"][0].clone();
            decision["request_id"] = format!("request-{number}-{at}").into();
            decision["decided_unix_ms"] = (number * 1000 + at).into();
            decision
        };
        next["decisions"] = (0..8).map(decision).collect();
        next
    };
    numbers.map(one).collect()
}

/// What the page holds after the garbage is collected: nodes, listeners, bytes of the heap.
async fn held(browser: &Browser) -> [u64; 3] {
    for _ in 0..3 {
        browser.command("HeapProfiler.collectGarbage", json!({})).await;
    }
    let counts = browser.command("Memory.getDOMCounters", json!({})).await;
    let heap = browser.command("Runtime.getHeapUsage", json!({})).await;
    let figure = |value: &Value| value.as_f64().unwrap() as u64;
    [&counts["nodes"], &counts["jsEventListeners"], &heap["usedSize"]].map(figure)
}

#[tokio::test]
async fn the_page_holds_no_more_after_thousands_of_snapshots() {
    let cluster = Cluster::start(Spec::default()).await;
    let base = snapshot(&cluster).await;
    let stage = Stage::start(cluster.admin.clone()).await;
    let browser = Browser::start().await;
    browser.set_screen(Screen::DESKTOP).await;
    browser.open(&stage.url()).await;
    let show = async |numbers: std::ops::Range<u64>| {
        let last = numbers.end - 1;
        stage.send(changing(&base, numbers));
        browser.shows("#decisions tbody tr:first-child", &format!("request-{last}-7")).await;
    };
    // The charts' ten minutes are full.
    show(0..1001).await;
    let before = held(&browser).await;
    for thousand in 1..11 {
        show(thousand * 1001..(thousand + 1) * 1001).await;
    }
    let after = held(&browser).await;
    println!(
        "nodes, listeners, bytes after 1,001 and after 11,011 snapshots: {before:?}, {after:?}"
    );
    // Rows of workers that passed may differ; 10,000 snapshots would leave far more.
    assert!(after[0] <= before[0] + 1000, "nodes: {before:?}, {after:?}");
    assert!(after[1] <= before[1] + 50, "listeners: {before:?}, {after:?}");
    assert!(after[2] <= before[2] + (1 << 20), "heap: {before:?}, {after:?}");
    assert_eq!(browser.log().await, [""; 0]);
}

#[tokio::test]
async fn with_roles_the_page_asks_for_a_key_and_keeps_it_nowhere() {
    let mut keys = Keys::empty();
    let read = keys.role(OperatorRole::Read);
    let spec = Spec { admin_access: ", admin_access: roles", ..Spec::aggregated(2) };
    let cluster = tenants::start(&keys, "tenants: [ { name: acme } ]", spec).await;
    let browser = Browser::start().await;
    browser.set_screen(PHONE).await;
    browser.open(&format!("http://{}/", cluster.running.addresses.admin)).await;
    browser.shows("#key-form", "This router asks for a key").await;
    fits(&browser).await;
    is_labelled(&browser).await;
    let submit = async |key: &str| {
        let script = format!(
            "document.getElementById('key').value = {}; \
             document.querySelector('#key-form button').click()",
            Value::from(key)
        );
        browser.run(&script).await;
    };
    submit("sr-wrong").await;
    browser.shows("#key-problem", "does not accept this key").await;
    submit(&read).await;
    browser.shows("#workers tbody th .name", "w1").await;
    browser.shows("#link-text", "Live").await;
    let kept = browser
        .run(
            "return document.documentElement.outerHTML + document.cookie + location.href \
              + JSON.stringify([{...localStorage}, {...sessionStorage}]) \
              + document.getElementById('key').value",
        )
        .await;
    assert!(!kept.as_str().unwrap().contains(&read[3..20]), "the key is in the page");
    assert_eq!(browser.texts("#cluster .pool h3").await, ["Workers"]);
    let log = browser.log().await;
    assert!(log.iter().all(|line| line.contains("401")), "{log:?}");
}

/// Landmarks, names of fields, and heads of tables.
async fn is_labelled(browser: &Browser) {
    let found = browser
        .run(
            "const all = (selector) => [...document.querySelectorAll(selector)]; return { \
              landmarks: ['header', 'main', 'h1'].map((name) => all(name).length), \
              fields: all('input, select').filter((field) => field.labels.length === 0).length, \
              heads: all('thead th').filter((head) => head.scope !== 'col').length, \
              buttons: all('button').filter((button) => button.innerText === '' \
                && button.checkVisibility()).length, \
              sections: all('section').filter((section) => { \
                const title = document.getElementById(section.getAttribute('aria-labelledby')); \
                return !title }).length }",
        )
        .await;
    assert_eq!((&found["landmarks"][1], &found["landmarks"][2]), (&1.into(), &1.into()), "{found}");
    for kind in ["fields", "heads", "buttons", "sections"] {
        assert_eq!(found[kind], 0, "{found}");
    }
}
