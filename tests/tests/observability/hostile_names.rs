//! A name that means something to each format stays a name: a real Prometheus scrapes it, and a
//! collector gets it in a trace.

use std::collections::BTreeSet;

use serde_json::json;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{Engines, eventually};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Spec};

use crate::server::Prometheus;
use crate::traces::collector::{Collector, Protocol, Reply, attribute};

/// The name of a model, which an operator may choose freely.
const MODEL: &str = "m\"} 1 # HELP \\ </script>{le=\"0\"} \u{e9}\u{202e} # EOF";

/// The worst id that a worker may have.
const WORKER: &str = "p:0_.-Z";

#[tokio::test]
async fn names_with_quotes_and_markup_reach_prometheus_and_traces_as_they_are() {
    let collector = Collector::start(Protocol::Grpc, Reply::Take).await;
    let spec = Spec {
        top: collector.tracing(""),
        engine: |_, config| config.model = MODEL.into(),
        ..Spec::default()
    };
    let engines = Engines::start(&spec).await;
    let yaml = engines.yaml.replace("name: sim", &format!("name: {}", json!(MODEL)));
    let yaml = yaml.replace("id: p0,", &format!("id: {},", json!(WORKER)));
    let folder = engines.files.path();
    let router = RouterProcess::serve(folder, &yaml, &[], &folder.join("router.log")).await;
    let http = Client::new(router.http);
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
    let mut body = completion(&prompt(40, "named"));
    body["model"] = MODEL.into();
    let reply = http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());

    let prometheus = Prometheus::start(folder, &[router.admin], &[]).await;
    let of = async |label: &str| -> BTreeSet<String> {
        let query = format!("group by ({label}) ({{__name__=~\"splitrail_.+\", {label}!=\"\"}})");
        let values = prometheus.query(&query).await;
        values.iter().filter_map(|(of, _)| of[label].as_str().map(str::to_owned)).collect()
    };
    eventually("the request is scraped", async || {
        let ok = prometheus.query("splitrail_request_results_total{result=\"ok\"} == 1").await;
        ok.len() == 1 && ok[0].0["model"] == MODEL
    })
    .await;
    assert_eq!(of("model").await, [MODEL, "none"].map(str::to_owned).into());
    assert_eq!(of("worker").await, [WORKER, "p1", "d0", "d1"].map(str::to_owned).into());
    let up = prometheus.query("up").await;
    assert_eq!(up[0].1, "1", "{up:?}");

    let spans = collector.traced(1).await;
    let request = spans.iter().find(|span| span.name == "request").unwrap();
    assert_eq!(attribute(request, "gen_ai.request.model"), MODEL);
}
