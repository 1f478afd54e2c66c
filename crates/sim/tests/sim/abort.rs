//! Clients that disconnect.

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use splitrail_sim::SimConfig;

use crate::support::*;

#[tokio::test]
async fn a_lost_client_frees_its_blocks() {
    for stream in [false, true] {
        let engine = start(SimConfig { decode_us_per_step: 1_000, ..SimConfig::default() }).await;
        let body = json!({"prompt": prompt(1, 100), "max_tokens": 20_000, "stream": stream});
        let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
        let request = Request::post(format!("{}/v1/completions", engine.url()))
            .body(Full::from(body.to_string()))
            .unwrap();
        let mut reply = Box::pin(client.request(request));
        let running = until("it runs", || engine.state().running == 1);
        if stream {
            let mut reply = reply.await.unwrap();
            reply.body_mut().frame().await.unwrap().unwrap();
            running.await;
            drop(reply);
        } else {
            tokio::select! {
                _ = &mut reply => panic!("answered too early"),
                () = running => {}
            }
            drop(reply);
        }
        drop(client);
        until("its blocks are free", || engine.state().blocks_used == 0).await;
        let state = engine.state();
        assert_eq!((state.running, state.waiting, state.totals.aborted), (0, 0, 1));
    }
}

#[tokio::test]
async fn a_waiting_request_can_be_cancelled() {
    let config = SimConfig { decode_us_per_step: 1_000, max_num_seqs: 1, ..SimConfig::default() };
    let engine = start(config).await;
    let engine = &engine;
    let ask = |seed| async move { complete(engine, &prompt(seed, 20), 10_000).await };
    {
        let mut first = Box::pin(ask(1));
        let mut second = Box::pin(ask(2));
        tokio::select! {
            _ = &mut first => panic!("answered too early"),
            _ = &mut second => panic!("answered too early"),
            () = until("one runs, one waits", || {
                let state = engine.state();
                (state.running, state.waiting) == (1, 1)
            }) => {}
        }
    }
    until("both are gone", || engine.state().totals.aborted == 2).await;
    assert_eq!(engine.state().blocks_used, 0);
}
