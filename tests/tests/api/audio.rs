//! Recordings: `/v1/audio/transcriptions` and `/v1/audio/translations`, whose bodies are forms.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, KvConnector, RecordedRequest};
use splitrail_tests::client::{Client, Events, Reply};
use splitrail_tests::cluster::eventually;
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply};
use splitrail_tests::solo::Solo;
use splitrail_tests::tenants::{self, Keys, bearer};
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, error_of};
use splitrail_tests::{Cluster, Spec};

const TRANSCRIPTIONS: &str = "/v1/audio/transcriptions";
const TRANSLATIONS: &str = "/v1/audio/translations";
const PATHS: [&str; 2] = [TRANSCRIPTIONS, TRANSLATIONS];

/// The boundary of the clients' forms.
const BOUNDARY: &str = "of-the-client";
const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=of-the-client");

/// A recording in which the framing of a form seems to stand.
const FILE: &[u8] =
    b"\x00RIFF\xff\r\n\r\n--of-the-clien\r\n--x--\r\nContent-Disposition: form-data; name=\"rid\"\r\n\r\nx";

fn spec(workers: usize) -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        engine: |_, config| config.transcribes = true,
        ..Spec::aggregated(workers)
    }
}

/// A form with these texts and a recording.
fn form(texts: &[(&str, &str)], file: &[u8]) -> Vec<u8> {
    let open = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=");
    let text = |(name, text): &(&str, &str)| format!("{open}\"{name}\"\r\n\r\n{text}\r\n");
    let texts: String = texts.iter().map(text).collect();
    let head =
        format!("{open}\"file\"; filename=\"a speech.wav\"\r\nContent-Type: audio/wav\r\n\r\n");
    let end = format!("\r\n--{BOUNDARY}--\r\n");
    [texts.as_bytes(), head.as_bytes(), file, end.as_bytes()].concat()
}

async fn post(client: &Client, path: &str, texts: &[(&str, &str)]) -> Reply {
    client.post_with(path, &[FORM], form(texts, FILE)).await
}

async fn stream(client: &Client, path: &str, texts: &[(&str, &str)]) -> Events {
    let texts = [texts, &[("model", "sim"), ("stream", "True")]].concat();
    client.stream_bytes(path, &[FORM], form(&texts, FILE)).await
}

/// The forms that an engine got.
fn asked(cluster: &Cluster, engine: &str) -> Vec<RecordedRequest> {
    let requests = cluster.engine(engine).requests();
    requests.into_iter().filter(|request| PATHS.contains(&&*request.path)).collect()
}

fn text_of(chunks: &[Value]) -> String {
    let contents =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    contents.collect()
}

#[tokio::test]
async fn the_text_of_a_recording_comes_whole_and_streamed() {
    let trial = &mut Trial::start(spec(2)).await;
    for path in PATHS {
        let mut texts = BTreeSet::new();
        for format in ["json", "text", "verbose_json"] {
            trial.expect("ok");
            let texts_of = [("model", "sim"), ("response_format", format)];
            let reply = post(&trial.cluster.http, path, &texts_of).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.header("content-type"), "application/json");
            assert_eq!(reply.route("flow"), Some("aggregated"));
            let told = reply.json();
            let has_usage = path == TRANSCRIPTIONS && format != "verbose_json";
            let usage = json!({"type": "duration", "seconds": 1});
            assert_eq!(told["usage"], if has_usage { usage } else { Value::Null }, "{told}");
            texts.insert(told["text"].as_str().unwrap().to_owned());
        }
        for wants_usage in [false, true] {
            trial.expect("ok");
            let usage = [("stream_include_usage", "true")];
            let more = if wants_usage { &usage[..] } else { &[] };
            let mut events = stream(&trial.cluster.http, path, more).await;
            assert_eq!(events.headers["content-type"], "text/event-stream");
            let mut chunks = events.chunks().await;
            if wants_usage {
                assert_eq!(chunks.pop().unwrap()["usage"]["prompt_tokens"], 54);
            }
            assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "{chunks:?}");
            texts.insert(text_of(&chunks));
        }
        assert_eq!(texts.len(), 1, "{texts:?}");
        let text = texts.pop_first().unwrap();
        assert!(text.contains(&format!("{} bytes", FILE.len())), "{text}");
    }
    let counts = ["w0", "w1"].map(|engine| asked(&trial.cluster, engine).len());
    assert_eq!(counts, [5, 5], "both take turns");
    // The tokens of streams alone are known.
    for (metric, labels, count) in [
        ("prompt_tokens_total", &[][..], 4 * 54),
        ("generation_tokens_total", &[], 4 * 4),
        ("cached_tokens_total", &[], 0),
        ("requests_total", &[("endpoint", "transcriptions")], 5),
        ("requests_total", &[("endpoint", "translations")], 5),
        ("untokenized_prompts_total", &[], 0),
    ] {
        let metric = format!("splitrail_{metric}");
        assert_eq!(trial.cluster.metric(&metric, labels).await as usize, count, "{metric}");
    }
    trial.check().await;
}

#[tokio::test]
async fn an_engine_gets_a_form_of_the_routers_own_with_the_recording_as_it_was() {
    let script = |_: &ReceivedRequest| ScriptedReply::json(200, r#"{"text":"x"}"#);
    let solo = Solo::start_with("{}", "    aliases: [other]\n", script).await;
    let texts = [("model", "other"), ("prompt", "a\r\n--of-the-client-not"), ("language", "")];
    let body = form(&texts[..1], FILE);
    for _ in 0..2 {
        let reply = solo.http.post_with(TRANSCRIPTIONS, &[FORM], body.clone()).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    // Where the client's boundary goes on in a text, the form could be read in two ways.
    assert_eq!(post(&solo.http, TRANSCRIPTIONS, &texts).await.status, 400);
    let heard: Vec<ReceivedRequest> =
        solo.post.heard().into_iter().filter(ReceivedRequest::is_inference).collect();
    let boundaries: BTreeSet<String> = heard
        .iter()
        .map(|heard| {
            let kind = heard.header("content-type");
            let boundary = kind.strip_prefix("multipart/form-data; boundary=").unwrap().to_owned();
            let expected = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nsim\r\n\
                 --{boundary}\r\nContent-Disposition: form-data; name=\"file\"; \
                 filename=\"a_speech.wav\"\r\nContent-Type: application/octet-stream\r\n\r\n"
            );
            let end = format!("\r\n--{boundary}--\r\n");
            assert_eq!(heard.body, [expected.as_bytes(), FILE, end.as_bytes()].concat());
            boundary
        })
        .collect();
    assert_eq!((heard.len(), boundaries.len()), (2, 2), "another one each time");
    assert!(boundaries.iter().all(|boundary| boundary.len() == 32));
}

#[tokio::test]
async fn an_engine_gets_no_field_of_a_form_that_is_not_the_clients_business() {
    let trial = &mut Trial::start(Spec {
        model: "adapters: [my-lora]\npass_unknown: [opened]".into(),
        engine: |_, config| {
            (config.transcribes, config.adapters) = (true, vec!["my-lora".into()]);
        },
        ..spec(1)
    })
    .await;
    trial.expect("ok");
    let texts = [
        ("model", "my-lora"),
        ("kv_transfer_params", "{\"do_remote_prefill\": true}"),
        ("request_id", "mine"),
        ("priority", "-1"),
        ("made_up", "1"),
        ("cache_hit_threshold", "0.5"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
        ("vllm_xargs", r#"{"ok": 1, "kv_transfer\u005fparams": {"a": 1}, "in": [{"rid": 1}]}"#),
        ("n", "2"),
        ("temperature", "0.20"),
        ("use_beam_search", "False"),
    ];
    let reply = post(&trial.cluster.http, TRANSCRIPTIONS, &texts).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let removed = "kv_transfer_params, request_id, priority, made_up, kv_transfer_params, rid";
    assert_eq!(reply.header("x-splitrail-removed-fields"), removed);
    let mut seen = asked(&trial.cluster, "w0").pop().unwrap();
    assert_eq!(seen.body["file"].take()[0], "a_speech.wav");
    let extensions = seen.body["vllm_xargs"].take();
    let extensions: Value = serde_json::from_str(extensions.as_str().unwrap()).unwrap();
    assert_eq!(extensions, json!({"ok": 1, "in": [{}]}));
    let expected = json!({
        "model": "my-lora", "timestamp_granularities[]": ["word", "segment"], "vllm_xargs": null,
        "n": "2", "temperature": "0.20", "use_beam_search": "false", "file": null,
    });
    assert_eq!(seen.body, expected);
    trial.check().await;
}

#[tokio::test]
async fn every_field_of_the_engines_forms_passes_or_steers() {
    let solo = Solo::start("{}", |_| ScriptedReply::json(200, r#"{"text":"x"}"#)).await;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/engine_fields.json");
    let fixture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut forms = 0;
    for request in fixture["engines"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|engine| engine["requests"].as_array().unwrap().iter())
    {
        let path = format!("/v1/audio/{}", request["endpoint"].as_str().unwrap());
        let Some(path) = PATHS.into_iter().find(|known| *known == path) else { continue };
        forms += 1;
        let fields = request["fields"].as_array().unwrap().iter();
        let fields: Vec<&str> = fields.filter_map(Value::as_str).filter(|f| *f != "file").collect();
        let texts: Vec<_> = fields
            .iter()
            .map(|name| match *name {
                "model" => (*name, "sim"),
                "vllm_xargs" => (*name, "{}"),
                "stream" => (*name, "false"),
                _ => (*name, "1"),
            })
            .collect();
        let reply = post(&solo.http, path, &texts).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let heard = solo.post.heard();
        let sent = heard.iter().rfind(|heard| heard.is_inference()).unwrap().text();
        for name in fields {
            let passes = sent.contains(&format!("name=\"{name}\""));
            assert_eq!(passes, fixture["held_back"][name].is_null(), "{name} has no rule");
        }
    }
    assert_eq!(forms, 3);
}

#[tokio::test]
async fn mistakes_in_a_form_are_named_where_they_are_before_an_engine_is_asked() {
    let limits = "{ drain_delay: 1ms, body_size_max: 200000 }";
    let trial = &mut Trial::start(Spec { limits, ..spec(1) }).await;
    let http = trial.cluster.http.clone();
    let model = ("model", "sim");
    for (texts, param, message) in [
        (&[][..], Some("model"), "`model` is missing"),
        (&[model, ("stream", "maybe")], Some("stream"), "true or false"),
        (&[model, ("n", "1000000")], Some("n"), "limits.n_max"),
        (&[model, ("n", "two")], Some("n"), "an integer"),
        (&[model, ("max_completion_tokens", "1e99")], Some("max_completion_tokens"), "integer"),
        (&[model, ("cache_salt", "a")], Some("cache_salt"), "no `cache_salt`"),
        (&[model, ("vllm_xargs", "[]")], Some("vllm_xargs"), "must be an object"),
        (&[model, ("language", "en"), ("language", "de")], None, "its part 3 has a name"),
        (&[model, ("file", "x")], Some("file"), "needs a `filename`"),
    ] {
        trial.expect("invalid_request");
        let reply = post(&http, TRANSCRIPTIONS, texts).await;
        let error = reply.json();
        let error = error_of(&error);
        assert_eq!((reply.status.as_u16(), &error["param"]), (400, &json!(param)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    let good = form(&[model], FILE);
    for body in [&good[..good.len() - 4], &good[2..], b"", b"{}"] {
        trial.expect("invalid_request");
        let reply = http.post_with(TRANSLATIONS, &[FORM], body.to_vec()).await;
        assert_eq!(reply.status, 400);
        assert_eq!(error_of(&reply.json())["code"], "invalid_form", "{}", reply.text());
    }
    trial.expect("model_not_found");
    assert_eq!(post(&http, TRANSCRIPTIONS, &[("model", "x")]).await.status, 404);
    trial.expect("body_too_large");
    let long = form(&[model], &[0; 200_000]);
    assert_eq!(http.post_with(TRANSCRIPTIONS, &[FORM], long).await.status, 413);
    for kind in ["application/json", "multipart/form-data", "multipart/mixed; boundary=a", ""] {
        trial.expect("unsupported_media");
        let reply = http.post_with(TRANSCRIPTIONS, &[("content-type", kind)], good.clone()).await;
        assert_eq!((reply.status.as_u16(), reply.header("accept")), (415, "multipart/form-data"));
    }
    assert_eq!(asked(&trial.cluster, "w0").len(), 0);
    // What the engine refuses is in its words.
    for (texts, message) in [
        ([model, ("response_format", "srt")], "json, text or verbose_json"),
        ([("stream", "1"), ("response_format", "verbose_json")], "doesn't support streaming"),
    ] {
        trial.expect("engine_rejected");
        let texts = [&texts[..], &[model][..usize::from(texts[0] != model)]].concat();
        let reply = post(&http, TRANSCRIPTIONS, &texts).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(reply.text().contains(message), "{}", reply.text());
    }
    trial.check().await;
}

#[tokio::test]
async fn a_worker_that_fails_is_replaced_until_text_has_been_passed_on() {
    let model = "timeouts: { reply: 3s, first_token: 3s }";
    let trial = &mut Trial::start(Spec { model: model.into(), ..spec(2) }).await;
    let http = trial.cluster.http.clone();
    for fault in [FaultKind::Status { status: 500 }, FaultKind::Reset, FaultKind::Hang] {
        for is_streamed in [false, true] {
            trial.fault("w0", fault.clone(), Some(1));
            for _ in 0..2 {
                trial.expect("ok");
                if is_streamed {
                    let chunks = stream(&http, TRANSCRIPTIONS, &[]).await.chunks().await;
                    assert!(text_of(&chunks).ends_with("in all"), "{fault:?}");
                } else {
                    let reply = post(&http, TRANSCRIPTIONS, &[("model", "sim")]).await;
                    assert_eq!(reply.status, 200, "{fault:?}: {}", reply.text());
                }
            }
        }
    }
    assert_eq!(trial.retries("decode").await, 6.0);
    // The end of the first piece is not that of the reply.
    for fault in [FaultKind::DieMidStream { after_chunks: 2 }, FaultKind::NoDone] {
        for worker in ["w0", "w1"] {
            trial.fault(worker, fault.clone(), Some(1));
        }
        for _ in 0..2 {
            trial.expect("decode_lost");
            let mut events = stream(&http, TRANSCRIPTIONS, &[]).await.rest().await;
            let last: Value = serde_json::from_str(&events.pop().unwrap()).unwrap();
            assert_eq!(last["error"]["code"], "decode_lost", "{fault:?}: {last}");
            assert!(!events.is_empty(), "{fault:?}");
        }
    }
    trial.check().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_everything() {
    let trial = &mut Trial::start(spec(1)).await;
    for is_streamed in ["false", "true"] {
        trial.fault("w0", FaultKind::Hang, Some(1));
        trial.expect("cancelled");
        let (client, before) = (trial.cluster.http.clone(), asked(&trial.cluster, "w0").len());
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move {
            post(&client, TRANSCRIPTIONS, &[("model", "sim"), ("stream", is_streamed)]).await
        });
        let begun = async || asked(&trial.cluster, "w0").len() > before;
        eventually("the engine has it", begun).await;
        tasks.shutdown().await;
    }
    trial.check().await;
}

#[tokio::test]
async fn engines_without_recordings_are_not_held_at_fault() {
    let engine = |name: &str, config: &mut splitrail_sim::SimConfig| {
        config.transcribes = name == "w2";
    };
    let trial = &mut Trial::start(Spec { engine, ..spec(3) }).await;
    let http = trial.cluster.http.clone();
    for _ in 0..3 {
        trial.expect("ok");
        let reply = post(&http, TRANSCRIPTIONS, &[("model", "sim")]).await;
        assert_eq!((reply.status.as_u16(), reply.route("decode")), (200, Some("w2")));
        trial.expect("ok");
        let chunks = stream(&http, TRANSLATIONS, &[]).await.chunks().await;
        assert!(text_of(&chunks).starts_with("translated"), "{chunks:?}");
    }
    assert!(["w0", "w1"].iter().all(|engine| asked(&trial.cluster, engine).len() <= 2));
    assert_eq!(trial.post("ok", COMPLETIONS, &completion("a")).await.status, 200);
    assert_eq!(trial.retries("decode").await, 0.0);
    trial.check().await;

    let spec = Spec { engine: |_, _| {}, ..spec(1) };
    let trial = &mut Trial::start(spec).await;
    for is_streamed in ["false", "true"] {
        trial.expect("not_offered");
        let texts = [("model", "sim"), ("stream", is_streamed)];
        let reply = post(&trial.cluster.http, TRANSCRIPTIONS, &texts).await;
        assert_eq!(reply.status, 404, "{}", reply.text());
    }
    trial.check().await;
}

#[tokio::test]
async fn a_text_that_is_no_json_is_passed_on_as_a_text() {
    // SGLang replies with a plain text, and has no translations.
    let spec = Spec { connector: KvConnector::Sglang, ..spec(1) };
    let trial = &mut Trial::start(spec).await;
    let texts = [("model", "sim"), ("response_format", "text")];
    trial.expect("ok");
    let reply = post(&trial.cluster.http, TRANSCRIPTIONS, &texts).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), "text/plain; charset=utf-8");
    assert!(reply.text().ends_with("in all"), "{}", reply.text());
    trial.expect("not_offered");
    assert_eq!(post(&trial.cluster.http, TRANSLATIONS, &texts).await.status, 404);
    trial.check().await;

    const SUBTITLES: &str = "1\n00:00:00,000 --> 00:00:01,000\n{a} [b]\n";
    let solo = Solo::start("{}", |_| ScriptedReply::json(200, SUBTITLES)).await;
    let detail = ("x-splitrail-usage", "detail");
    for (format, status) in [("srt", 200), ("vtt", 200), ("json", 502)] {
        let body = form(&[("model", "sim"), ("response_format", format)], FILE);
        let reply = solo.http.post_with(TRANSCRIPTIONS, &[FORM, detail], body).await;
        assert_eq!(reply.status, status, "{}", reply.text());
        assert!(status != 200 || reply.text() == SUBTITLES, "{}", reply.text());
    }
}

#[tokio::test]
async fn a_recording_is_charged_to_the_memory_of_requests_until_its_reply() {
    let held = || ScriptedReply::Held { first: Vec::new(), last: Vec::new() };
    let solo = Solo::start("{ request_memory_max: 40000000 }", move |_| held()).await;
    let body = form(&[("model", "sim")], &vec![7; 15 << 20]);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (client, body) = (solo.http.clone(), body.clone());
        tasks.spawn(async move { client.post_with(TRANSCRIPTIONS, &[FORM], body).await });
    }
    eventually("the engine has both", async || {
        solo.post.heard().iter().filter(|heard| heard.is_inference()).count() == 2
    })
    .await;
    let memory = async || solo.metric("splitrail_request_memory_bytes", &[]).await;
    let charged = memory().await / f64::from(30 << 20);
    assert!((1.0..1.05).contains(&charged), "each once, and not copied: {charged}");
    let shed = solo.http.post_with(TRANSCRIPTIONS, &[FORM], body).await;
    assert_eq!(shed.status, 503, "{}", shed.text());
    tasks.shutdown().await;
    eventually("all of it is given back", async || memory().await == 0.0).await;
}

/// A browser sends forms across sites without asking the router first.
#[tokio::test]
async fn a_page_of_another_site_cannot_send_forms() {
    let script = |_: &ReceivedRequest| ScriptedReply::json(200, r#"{"text":"x"}"#);
    let own = async |solo: &Solo| format!("http://{}", solo.router.http);
    let solo = Solo::start("{}", script).await;
    let listed = Solo::start_listening("http_origins: [https://chat.example]", "{}", script).await;
    for (solo, origin, status) in [
        (&solo, "https://chat.example", 403),
        (&solo, "null", 403),
        (&solo, &*own(&solo).await, 200),
        (&listed, "https://chat.example", 200),
        (&listed, "https://chat.example.evil", 403),
        (&listed, &own(&listed).await, 200),
    ] {
        let headers = [FORM, ("origin", origin)];
        let body = form(&[("model", "sim")], FILE);
        let reply = solo.http.post_with(TRANSCRIPTIONS, &headers, body).await;
        assert_eq!(reply.status, status, "{origin}: {}", reply.text());
    }
    let heard = solo.post.heard();
    assert_eq!(heard.iter().filter(|heard| heard.is_inference()).count(), 1);
}

#[tokio::test]
async fn recordings_count_towards_the_limits_of_their_tenant() {
    let mut keys = Keys::empty();
    let key = bearer(&keys.tenant("a"));
    let tenants = "tenants: [ { name: a, limits: { tokens_per_minute: 4000 } } ]";
    let cluster = tenants::start(&keys, tenants, spec(1)).await;
    let headers = [FORM, ("authorization", &*key)];
    let ask = async |texts: &[(&str, &str)], file: &[u8]| {
        cluster.http.post_with(TRANSCRIPTIONS, &headers, form(texts, file)).await
    };
    assert_eq!(cluster.http.post_with(TRANSCRIPTIONS, &[FORM], form(&[], FILE)).await.status, 401);
    let model = ("model", "sim");
    let reply = ask(&[model, ("stream", "true")], FILE).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    // Five minutes.
    let reply = ask(&[model], &vec![0; 300 * 32_000]).await;
    assert_eq!(reply.status, 429, "{}", reply.text());
    let reply = ask(&[model], FILE).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let seen = asked(&cluster, "w0");
    assert!(seen.iter().all(|seen| seen.body["cache_salt"].is_null()));
    assert_eq!(seen.len(), 2);
}
