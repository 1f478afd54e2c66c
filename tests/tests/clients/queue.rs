//! Requests that wait in the router: who goes first, who may not wait, and who leaves.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};
use tokio::task::JoinSet;

const JSON: (&str, &str) = ("content-type", "application/json");

struct Line {
    cluster: Arc<Cluster>,
    tasks: JoinSet<()>,
    done: Arc<Mutex<Vec<&'static str>>>,
}

impl Line {
    async fn begin(queue: &str) -> Self {
        let cluster = Arc::new(Cluster::start(Spec::queued(queue)).await);
        Self { cluster, tasks: JoinSet::new(), done: Arc::default() }
    }

    /// Sends a prompt of so many words, and waits until so many wait.
    async fn send(&mut self, name: &'static str, words: usize, more: &[(&str, &str)], depth: f64) {
        let body = completion(&prompt(words, name)).to_string();
        let headers: Vec<(String, String)> = [JSON]
            .iter()
            .chain(more)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let (cluster, done) = (Arc::clone(&self.cluster), Arc::clone(&self.done));
        self.tasks.spawn(async move {
            let headers: Vec<(&str, &str)> =
                headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let reply = cluster.http.post_with(COMPLETIONS, &headers, body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            done.lock().unwrap().push(name);
        });
        self.waits(depth).await;
    }

    async fn waits(&self, depth: f64) {
        eventually(&format!("{depth} wait"), async || {
            let sent = self.cluster.metric("splitrail_requests_in_flight", &[]).await;
            let waits = self.cluster.metric("splitrail_queue_depth", &[]).await;
            waits == depth && sent > depth
        })
        .await;
    }

    async fn end(mut self) -> Vec<&'static str> {
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        self.cluster.quiet().await;
        let done = self.done.lock().unwrap();
        done.clone()
    }
}

#[tokio::test]
async fn the_shortest_goes_first() {
    let mut line = Line::begin("").await;
    line.send("first", 300, &[], 0.0).await;
    line.send("long", 200, &[], 1.0).await;
    line.send("middle", 100, &[], 2.0).await;
    line.send("short", 10, &[], 3.0).await;
    assert_eq!(line.end().await, ["first", "short", "middle", "long"]);
}

#[tokio::test]
async fn the_queue_serves_in_order_of_arrival_if_configured() {
    let mut line = Line::begin("order: arrival").await;
    line.send("first", 300, &[], 0.0).await;
    line.send("long", 150, &[], 1.0).await;
    line.send("short", 10, &[], 2.0).await;
    assert_eq!(line.end().await, ["first", "long", "short"]);
}

#[tokio::test]
async fn a_client_s_priority_counts_as_far_as_it_may() {
    let mut line = Line::begin("priority_max: 1").await;
    line.send("first", 300, &[], 0.0).await;
    line.send("short", 10, &[], 1.0).await;
    line.send("long", 100, &[("x-splitrail-priority", "1")], 2.0).await;
    // More than it may is as much as it may: of two equals the shorter goes first.
    line.send("middle", 50, &[("x-splitrail-priority", "9")], 3.0).await;
    assert_eq!(line.end().await, ["first", "middle", "long", "short"]);
}

#[tokio::test]
async fn a_waiting_request_whose_client_leaves_costs_nothing() {
    let mut line = Line::begin("").await;
    line.send("first", 300, &[], 0.0).await;
    let mut gone = JoinSet::new();
    let cluster = Arc::clone(&line.cluster);
    gone.spawn(async move {
        let body = completion(&prompt(50, "gone")).to_string();
        cluster.http.post_with(COMPLETIONS, &[JSON], body).await
    });
    line.waits(1.0).await;
    gone.shutdown().await;
    line.waits(0.0).await;
    let cluster = Arc::clone(&line.cluster);
    assert_eq!(line.end().await, ["first"]);
    let seen = cluster.engine("p0").requests();
    assert_eq!(seen.iter().filter(|request| request.path == COMPLETIONS).count(), 1);
}

#[tokio::test]
async fn a_goal_that_cannot_be_met_is_refused_at_once_and_only_then() {
    let mut line = Line::begin("ttft_goal: 3s").await;
    // Alone it takes longer than the goal, and no later time would be better.
    line.send("first", 1200, &[], 0.0).await;
    let body = completion(&prompt(100, "late")).to_string();
    let refused = line.cluster.http.post_with(COMPLETIONS, &[JSON], body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let error: Value = refused.json()["error"].clone();
    assert_eq!((&error["code"], &error["type"]), (&"busy".into(), &"rate_limit_error".into()));
    let after: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=10).contains(&after), "{after}");
    let labels = [("reason", "ttft_goal")];
    assert_eq!(line.cluster.metric("splitrail_shed_total", &labels).await, 1.0);
    assert_eq!(line.end().await, ["first"]);
}

#[tokio::test]
async fn a_full_queue_refuses() {
    let mut line = Line::begin("max_waiting: 1").await;
    line.send("first", 300, &[], 0.0).await;
    line.send("second", 20, &[], 1.0).await;
    let body = completion(&prompt(20, "third")).to_string();
    let refused = line.cluster.http.post_with(COMPLETIONS, &[JSON], body).await;
    assert_eq!(refused.status, 429);
    assert!(refused.text().contains("queue.max_waiting"), "{}", refused.text());
    assert_eq!(line.end().await, ["first", "second"]);
}

#[tokio::test]
async fn a_request_that_has_waited_too_long_is_refused_and_may_be_retried() {
    let mut line = Line::begin("max_wait: 300ms").await;
    // Over three seconds of prefill.
    line.send("first", 400, &[], 0.0).await;
    let body = completion(&prompt(20, "second")).to_string();
    let refused = line.cluster.http.post_with(COMPLETIONS, &[JSON], body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.text().contains("queue.max_wait"), "{}", refused.text());
    assert!(refused.header("retry-after").parse::<u32>().unwrap() >= 1);
    let labels = [("reason", "max_wait")];
    assert_eq!(line.cluster.metric("splitrail_shed_total", &labels).await, 1.0);
    assert_eq!(line.cluster.metric("splitrail_queue_depth", &[]).await, 0.0);
    assert_eq!(line.end().await, ["first"]);
}

#[tokio::test]
async fn a_request_that_the_queue_refuses_has_made_no_attempt() {
    let spec = Spec {
        model: "queue: { max_wait: 300ms }\ncosts: { prefill_us_per_token: 1000 }".into(),
        policy: "{ kind: predicted_ttft }",
        engine: |_, config| config.prefill_us_per_token = 1000,
        ..Spec::aggregated(1)
    };
    let (cluster, tasks) = (Arc::new(Cluster::start(spec).await), JoinSet::new());
    let mut line = Line { cluster, tasks, done: Arc::default() };
    // Over three seconds of prefill.
    line.send("first", 400, &[], 0.0).await;
    let body = completion(&prompt(20, "second")).to_string();
    let refused = line.cluster.http.post_with(COMPLETIONS, &[JSON], body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let decisions = line.cluster.decisions(refused.header("x-request-id")).await;
    assert_eq!(decisions[0]["attempts"], 0, "{}", decisions[0]);
    assert_eq!(line.end().await, ["first"]);
}

/// The router reads the events of a batch only when all of its prompts have begun.
#[tokio::test]
async fn the_prompts_of_a_streamed_batch_keep_no_request_waiting() {
    let spec = Spec {
        policy: "{ kind: predicted_ttft }",
        model: "queue: { max_wait: 20s }\ncosts: { prefill_us_per_token: 1000 }".into(),
        engine: |_, config| config.prefill_us_per_token = 1000,
        ..Spec::aggregated(1)
    };
    let mut trial = Trial::start(spec).await;
    let mut batch = streamed(&completion(""));
    batch["prompt"] = json!(["a", "b", "c", "d"].map(|name| prompt(20, name)));
    let single = completion(&prompt(20, "other"));
    trial.expect("ok");
    trial.expect("ok");
    let http = &trial.cluster.http;
    let other = async {
        trial.until_running("w0").await;
        http.post(COMPLETIONS, &single).await
    };
    let (batch, other) = tokio::join!(http.post(COMPLETIONS, &batch), other);
    assert_eq!(batch.status, 200, "{}", batch.text());
    assert_eq!(other.status, 200, "{}", other.text());
    trial.finish().await;
}
