//! Every connector without faults: what clients get, and what engines have done for it.

use serde_json::{Value, json};
use splitrail_sim::KvConnector;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};
use splitrail_tests::{Cluster, Spec};

use super::{CONNECTORS, pd, requests, said, sample};

#[tokio::test]
async fn answers_are_those_of_one_engine_on_every_endpoint_streamed_and_not() {
    let one = Cluster::start(Spec::aggregated(1)).await;
    for connector in CONNECTORS {
        let mut trial = Trial::start(pd(connector, 2, 2)).await;
        for (salt, stream) in [(1, false), (2, true)] {
            for (path, body) in requests(connector, salt) {
                let expected = said(path, &[one.http.post(path, &body).await.json()], false, 0);
                let what = format!("{connector:?} {path}");
                let replies = if stream {
                    let mut events = trial.stream("ok", path, &body).await;
                    let route = events.headers["x-splitrail-route"].to_str().unwrap().to_owned();
                    assert!(route.contains("flow=prefill_first; prefill=p"), "{what}: {route}");
                    events.chunks().await
                } else {
                    let reply = trial.post("ok", path, &body).await;
                    assert_eq!(reply.status, 200, "{what}: {}", reply.text());
                    assert!(reply.route("prefill").unwrap().starts_with('p'), "{what}");
                    assert!(reply.route("decode").unwrap().starts_with('d'), "{what}");
                    vec![reply.json()]
                };
                assert_eq!(said(path, &replies, stream, 0), expected, "{what}");
                assert!(replies.iter().all(|reply| reply["kv_transfer_params"].is_null()));
            }
        }
        // No decode worker has computed more than the tail of a block.
        for name in ["d0", "d1"] {
            let totals = trial.cluster.engine(name).state().totals;
            let most = match connector {
                KvConnector::SharedStorage => 16 * 6,
                // It was asked who it is.
                KvConnector::NixlPush => 16,
                _ => 0,
            };
            assert!(totals.local_compute_tokens <= most, "{connector:?} {totals:?}");
        }
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn cached_tokens_are_the_prefill_engine_s() {
    for connector in CONNECTORS {
        let mut trial = Trial::start(pd(connector, 1, 1)).await;
        let body = completion(&prompt(60, "cached"));
        let cold = trial.post("ok", COMPLETIONS, &body).await.json();
        let prompt_tokens = cold["usage"]["prompt_tokens"].as_u64().unwrap();
        let cached =
            |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
        assert_eq!(cached(&cold), 0, "{connector:?}");
        trial.cluster.settle().await;
        let mut streamed = body.clone();
        streamed["stream_options"] = json!({"include_usage": true});
        let full = json!((prompt_tokens - 1) / 16 * 16);
        let warm = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(cached(&warm.json()), full, "{connector:?}");
        assert_eq!(warm.route("cached_source"), Some("engine"), "{connector:?}");
        let chunks = trial.stream("ok", COMPLETIONS, &streamed).await.chunks().await;
        assert_eq!(cached(chunks.last().unwrap()), full, "{connector:?}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn several_samples_take_one_prefill_and_are_those_of_one_engine() {
    let one = Cluster::start(Spec::aggregated(1)).await;
    for connector in CONNECTORS {
        let mut trial = Trial::start(pd(connector, 1, 2)).await;
        for (salt, stream) in [(3, false), (4, true)] {
            for (path, mut body) in requests(connector, salt) {
                sample(path, &mut body, "n", json!(3));
                if connector != KvConnector::Sglang {
                    // Sampled, and different; of SGLang each sample is a request of its own.
                    sample(path, &mut body, "temperature", json!(0.5));
                    sample(path, &mut body, "seed", json!(7));
                }
                let expected = one.http.post(path, &body).await.json();
                let what = format!("{connector:?} {path} {stream}");
                body["stream"] = stream.into();
                let replies = if stream {
                    body["stream_options"] = json!({"include_usage": true});
                    trial.stream("ok", path, &body).await.chunks().await
                } else {
                    let reply = trial.post("ok", path, &body).await;
                    assert_eq!(reply.status, 200, "{what}: {}", reply.text());
                    assert!(reply.route("prefill").is_some(), "{what}");
                    vec![reply.json()]
                };
                for index in 0..3 {
                    let ours = said(path, &replies, stream, index);
                    assert!(!ours.is_empty());
                    assert_eq!(
                        ours,
                        said(path, std::slice::from_ref(&expected), false, index),
                        "{what}"
                    );
                }
                let usage = &replies.last().unwrap()["usage"];
                for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
                    assert_eq!(usage[key], expected["usage"][key], "{what} {key}");
                }
                // At most what chats share of their template.
                let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
                assert!(cached.unwrap() <= 16, "{what} {usage}");
            }
        }
        let computed: u64 = trial.cluster.engine("p0").state().totals.local_compute_tokens;
        let asked: u64 = 2 * 3 * 130;
        assert!(computed < 2 * asked, "each prompt was computed once: {computed}");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn decode_first_hands_over_what_decode_does_not_hold_and_nothing_else() {
    let one = Cluster::start(Spec::aggregated(1)).await;
    for connector in [
        KvConnector::Nixl,
        KvConnector::NixlPush,
        KvConnector::SharedStorage,
        KvConnector::Mooncake,
    ] {
        let spec = Spec { flow: "decode_first", ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        for (path, mut body) in requests(connector, 9) {
            body["cache_hit_threshold"] = json!(0.5);
            for n in [1, 3] {
                sample(path, &mut body, "n", json!(n));
                for stream in [false, true] {
                    let mut plain = body.clone();
                    plain.as_object_mut().unwrap().remove("cache_hit_threshold");
                    let expected = one.http.post(path, &plain).await.json();
                    let replies = match stream {
                        true => trial.stream("ok", path, &body).await.chunks().await,
                        false => vec![trial.post("ok", path, &body).await.json()],
                    };
                    for index in 0..n {
                        let ours = said(path, &replies, stream, index);
                        let theirs = said(path, std::slice::from_ref(&expected), false, index);
                        assert_eq!(ours, theirs, "{connector:?} {path} {n} {stream}");
                    }
                    trial.cluster.settle().await;
                }
            }
        }
        // The first request of each prompt had a prefill; the others found it on decode.
        let mut prefills = trial.asked("p0");
        prefills.retain(|request| request.body["prompt"] != "splitrail"); // asked for its gate
        assert_eq!(prefills.len(), 3, "{connector:?}");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_batch_has_a_hand_off_per_prompt() {
    for connector in CONNECTORS {
        let mut trial = Trial::start(pd(connector, 2, 2)).await;
        let prompts = [prompt(30, "d"), prompt(40, "e"), prompt(50, "f")];
        let mut singles = Vec::new();
        for text in &prompts {
            let reply = trial.post("ok", COMPLETIONS, &completion(text)).await.json();
            singles.push(reply["choices"][0]["text"].clone());
        }
        let mut body = completion("");
        body["prompt"] = json!(prompts);
        for n in [1, 2] {
            body["n"] = n.into();
            let reply = trial.post("ok", COMPLETIONS, &body).await.json();
            let choices = reply["choices"].as_array().unwrap();
            assert_eq!(choices.len(), 3 * n);
            for (index, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], index, "{connector:?}");
                assert_eq!(choice["text"], singles[index / n], "{connector:?}");
            }
            assert_eq!(reply["usage"]["completion_tokens"], 36 * n);
        }
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_answer_of_one_token_is_a_prefill_worker_s_own() {
    let one = Cluster::start(Spec::aggregated(1)).await;
    for connector in CONNECTORS {
        let mut trial = Trial::start(pd(connector, 1, 1)).await;
        for stream in [false, true] {
            for (path, mut body) in requests(connector, 5 + u32::from(stream)) {
                sample(path, &mut body, "max_tokens", json!(1));
                let expected = said(path, &[one.http.post(path, &body).await.json()], false, 0);
                let replies = if stream {
                    trial.stream("ok", path, &body).await.chunks().await
                } else {
                    let reply = trial.post("ok", path, &body).await;
                    if connector != KvConnector::Sglang {
                        assert_eq!(reply.route("local"), Some("one_token"), "{connector:?}");
                        assert_eq!(reply.route("prefill"), Some("p0"), "{connector:?}");
                        assert_eq!(reply.route("decode"), None, "{connector:?}");
                    }
                    vec![reply.json()]
                };
                assert_eq!(said(path, &replies, stream, 0), expected, "{connector:?} {path}");
            }
        }
        if connector != KvConnector::Sglang {
            assert_eq!(trial.counts(["d0"]), [0], "{connector:?}");
        }
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_answer_that_ends_at_once_is_empty_everywhere() {
    for connector in CONNECTORS {
        let spec = Spec { engine: |_, config| config.eos_one_in = 1, ..pd(connector, 1, 1) };
        let mut trial = Trial::start(spec).await;
        for (path, body) in requests(connector, 7) {
            let reply = trial.post("ok", path, &body).await;
            assert_eq!(reply.status, 200, "{connector:?} {}", reply.text());
            let choice = &reply.json()["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{connector:?} {path}");
            let chunks = trial.stream("ok", path, &body).await.chunks().await;
            let last = &chunks.last().unwrap()["choices"][0];
            assert_eq!(last["finish_reason"], "stop", "{connector:?} {path}");
        }
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn blocks_that_are_evicted_between_samples_are_computed_again() {
    // Room for one prompt on the decode worker, with its samples; others press on it.
    let spec = Spec {
        engine: |name, config| {
            if name.starts_with('d') {
                config.kv_blocks = 40;
                config.max_num_seqs = 4;
            }
        },
        ..pd(KvConnector::Nixl, 1, 1)
    };
    let one = Cluster::start(Spec::aggregated(1)).await;
    let trial = Trial::start(spec).await;
    let mut bodies = Vec::new();
    for salt in 0..8 {
        let mut body = completion(&prompt(24, &format!("pressure{salt}y")));
        body["n"] = 3.into();
        body["temperature"] = json!(0.7);
        body["seed"] = salt.into();
        bodies.push(body);
    }
    let http = &trial.cluster.http;
    let replies = bodies.iter().map(|body| http.post(COMPLETIONS, body));
    let replies = futures_util::future::join_all(replies).await;
    for (reply, body) in replies.iter().zip(&bodies) {
        assert_eq!(reply.status, 200, "{}", reply.text());
        let expected = one.http.post(COMPLETIONS, body).await.json();
        assert_eq!(reply.json()["choices"], expected["choices"]);
    }
    trial.staged_blocks_are_freed().await;
}
