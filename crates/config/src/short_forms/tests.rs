//! The short forms of a model: what they are written out as, what follows from other keys, and
//! which cached tokenizers they find.
#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::hub::{CachedModel, Hub, is_id};
use super::workers::KnownIds;
use crate::model::{CacheLossTrackingConfig, Connector, Flow, Role, TokenizerConfig};
use crate::{LoadedConfig, Model, Parts, Problems, parse_for};

const COMMIT: &str = "9c925d64d72725edaf899c6cb9c377fd0709d9c5";

const FIVE_LINES: &str = "\
models:
  - name: Qwen/Qwen3-8B
    prefill: [\"http://10.0.0.1:8000\"]
    decode: [\"http://10.0.1.1:8000\"]
";

/// A cache with one model, and what finds it.
fn cache(id: &str, files: &[&str]) -> (TempDir, Hub) {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join(format!("models--{}", id.replace('/', "--")));
    let snapshot = model.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), COMMIT).unwrap();
    for file in files {
        fs::write(snapshot.join(file), "{}").unwrap();
    }
    let hub = at(folder.path());
    (folder, hub)
}

fn at(folder: &Path) -> Hub {
    Hub::of(|name| (name == "HF_HUB_CACHE").then(|| folder.as_os_str().to_owned()))
}

fn empty() -> Hub {
    Hub::of(|_| None)
}

fn read(hub: &Hub, text: &str) -> Result<LoadedConfig, Problems> {
    read_again(hub, text, &KnownIds::default())
}

/// The same, by a router that has given ids already.
fn read_again(hub: &Hub, text: &str, known: &KnownIds) -> Result<LoadedConfig, Problems> {
    let mut loaded = parse_for(Parts::ALL, (hub, known), "x.yaml", text, Path::new("/nowhere"))?;
    loaded.warnings.retain(|warning| !warning.message.starts_with("anyone who reaches"));
    Ok(loaded)
}

fn model(hub: &Hub, text: &str) -> Model {
    let loaded = read(hub, text).unwrap_or_else(|problems| panic!("{problems}\n{text}"));
    loaded.config.models[0].clone()
}

/// The problems of a text: place, message and hint.
fn told(hub: &Hub, text: &str) -> Vec<String> {
    let Err(problems) = read(hub, text) else { panic!("accepted:\n{text}") };
    let problems = problems.as_slice().iter();
    problems.map(|p| format!("{}:{} {} -> {}", p.line, p.column, p.message, p.hint)).collect()
}

fn path_of(model: &Model) -> Option<String> {
    match &model.tokenizer {
        TokenizerConfig::Huggingface(tokenizer) => Some(tokenizer.path.display().to_string()),
        TokenizerConfig::Engine(_) | TokenizerConfig::None {} => None,
    }
}

#[test]
fn five_lines_make_a_cluster() {
    let (folder, hub) = cache("Qwen/Qwen3-8B", &["tokenizer.json"]);
    let loaded = read(&hub, FIVE_LINES).unwrap();
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let [note] = loaded.notes.as_slice() else { panic!("{:?}", loaded.notes) };
    for part in ["model Qwen/Qwen3-8B: ", "flow decode_first", "connector nixl", "its tokenizer is"]
    {
        assert!(note.contains(part), "{note}");
    }
    let model = &loaded.config.models[0];
    let workers: Vec<_> =
        model.workers.iter().map(|w| (w.id.as_str(), w.role, w.url.as_str())).collect();
    assert_eq!(
        workers,
        [
            ("p0", Role::Prefill, "http://10.0.0.1:8000"),
            ("d0", Role::Decode, "http://10.0.1.1:8000"),
        ]
    );
    assert!(model.workers.iter().all(crate::WorkerConfig::asks_for_events));
    assert_eq!((model.flow, model.connector), (Flow::DecodeFirst, Connector::Nixl));
    assert_eq!(model.policy, splitrail_policy::Policy::predicted_ttft());
    assert!(model.queue.is_some());
    assert_eq!(model.cache_loss_tracking, Some(CacheLossTrackingConfig::default()));
    assert_eq!(model.health.unhealthy_threshold, 3);
    let snapshot = folder.path().join("models--Qwen--Qwen3-8B/snapshots").join(COMMIT);
    assert_eq!(path_of(model), Some(snapshot.display().to_string()));
}

#[test]
fn a_short_form_that_is_written_out_is_read_as_the_same_configuration() {
    let (_folder, hub) = cache("Qwen/Qwen3-8B", &["tokenizer.json"]);
    let off = "    queue: none\n    cache_loss_tracking: none\n    tokenizer: none\n";
    for text in [FIVE_LINES.to_owned(), format!("{FIVE_LINES}{off}")] {
        let written = serde_json::to_value(read(&hub, &text).unwrap().config).unwrap();
        let again = read(&hub, &written.to_string()).unwrap();
        assert!(again.notes.is_empty() && again.warnings.is_empty(), "{again:?}");
        assert_eq!(serde_json::to_value(again.config).unwrap(), written);
    }
}

#[test]
fn a_url_under_workers_does_both_parts() {
    let text = "models: [{ name: m, tokenizer: none, workers: ['https://[fd00::1]:8000', \
                { id: w, role: both, url: 'http://my_engine:1' }, 'http://your_engine:1'] }]";
    let model = model(&empty(), text);
    let ids: Vec<_> = model.workers.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!(ids, ["w0", "w", "w1"]);
    assert_eq!((model.flow, model.connector), (Flow::Aggregated, Connector::None));
    assert!(model.workers.iter().all(|worker| worker.role == Role::Both));
}

/// The ids of a model's workers, in the order of the file.
fn ids(text: &str, known: &KnownIds) -> Vec<String> {
    let text = format!("models: [{{ name: m, tokenizer: none, {text} }}]");
    let loaded = read_again(&empty(), &text, known).unwrap();
    loaded.config.models[0].workers.iter().map(|worker| worker.id.clone()).collect()
}

#[test]
fn an_address_keeps_its_id_when_others_come_and_go() {
    let known = |text: &str, before: &KnownIds| {
        let text = format!("models: [{{ name: m, tokenizer: none, {text} }}]");
        KnownIds::of(&read_again(&empty(), &text, before).unwrap().config)
    };
    let decode = "decode: ['http://d:1']";
    let first = format!("prefill: ['http://a:1', 'http://b:1', 'http://c:1'], {decode}");
    assert_eq!(ids(&first, &KnownIds::default()), ["p0", "p1", "p2", "d0"]);
    let running = known(&first, &KnownIds::default());
    // The one that left may still have requests: its number is not given away with the same reload.
    let next = format!("prefill: ['http://c:1', 'http://x:1', 'http://B:1'], {decode}");
    assert_eq!(ids(&next, &running), ["p2", "p3", "p1", "d0"]);
    let running = known(&next, &running);
    let last = format!("prefill: ['http://y:1', 'http://c:1', 'http://x:1'], {decode}");
    assert_eq!(ids(&last, &running), ["p0", "p2", "p3", "d0"]);
    // A restart, and another role, number anew.
    assert_eq!(ids(&last, &KnownIds::default()), ["p0", "p1", "p2", "d0"]);
    let swapped = "prefill: ['http://d:1'], decode: ['http://c:1']";
    assert_eq!(ids(swapped, &running), ["p0", "d1"]);
}

#[test]
fn no_derived_id_is_one_that_is_written_down() {
    let written = "workers: [{ id: p0, role: both, url: 'http://w:1' }, 'http://v:1'], \
                   prefill: ['http://a:1', 'http://b:1'], decode: ['http://d:1']";
    assert_eq!(ids(written, &KnownIds::default()), ["p0", "w0", "p1", "p2", "d0"]);
}

#[test]
fn mistakes_in_lists_of_urls_are_located() {
    let with = |lines: &str| format!("models:\n  - name: m\n    tokenizer: none\n{lines}");
    let decode = "    decode: ['http://d:1']\n";
    for (lines, expected) in [
        (
            "    prefill: ['p:1']\n",
            "4:15 `models[0].prefill[0]` has no scheme -> write `http://HOST",
        ),
        ("    prefill: ['http://p:1/v1']\n", "4:15 `models[0].prefill[0]` has a path -> "),
        ("    prefill: ['http://u:p@p:1']\n", "4:15 `models[0].prefill[0]` has a user or password"),
        ("    prefill: http://p:1\n", "4:14 `models[0].prefill` must be a list, not the text"),
        ("    prefill: [7]\n", "4:15 `models[0].prefill[0]` must be a text, not the number 7"),
        (
            "    prefill: ['http://p:1', 'http://p:1']\n",
            "4:29 `models[0].prefill[1]` http://p:1 is already taken at 4:15",
        ),
        (
            "    prefill: ['http://d:1']\n",
            "5:14 `models[0].decode[0]` http://d:1 is already taken at 4:15 -> one entry per engine; one that does both parts belongs into `workers`",
        ),
        (
            "    prefill: ['http://p:1']\n    workers: ['http://d:1']\n",
            "6:14 `models[0].decode[0]` http://d:1 is already taken at 5:15",
        ),
        (
            "    prefill: ['http://p:1']\n    workers: [{ id: w, role: decode, url: 'https://d:1' }]\n",
            "6:14 `models[0].decode[0]` http://d:1 is already taken at 5:43",
        ),
    ] {
        let told = told(&empty(), &with(&format!("{lines}{decode}")));
        assert!(told.len() == 1 && told[0].starts_with(expected), "{lines}: {told:#?}");
    }
}

#[test]
fn the_flow_follows_from_the_roles() {
    let (_folder, hub) = cache("Qwen/Qwen3-8B", &["tokenizer.json"]);
    let flow = |lines: &str| {
        let model = model(&hub, &format!("models:\n  - name: Qwen/Qwen3-8B\n{lines}"));
        (model.flow, model.connector)
    };
    let pair = "    prefill: ['http://p:1']\n    decode: ['http://d:1']\n";
    let without = format!("{pair}    tokenizer: none\n");
    assert_eq!(flow(&without), (Flow::PrefillFirst, Connector::Nixl));
    let sglang =
        format!("{pair}    connector: sglang\n    block_size: 64\n    on_no_prefill: fail\n");
    assert_eq!(flow(&sglang), (Flow::PrefillFirst, Connector::Sglang));
    let of_engine = sglang.replace("connector: sglang", "engine: sglang");
    assert_eq!(flow(&of_engine), (Flow::PrefillFirst, Connector::Sglang));
    let written = format!("{pair}    flow: auto\n    connector: mooncake\n");
    assert_eq!(flow(&written), (Flow::Auto, Connector::Mooncake));
    // Requests that stay on one worker need no connector, unless some may select another flow.
    let aggregated = format!("{pair}    flow: aggregated\n");
    assert_eq!(flow(&aggregated), (Flow::Aggregated, Connector::None));
    let of_engine = format!("{aggregated}    engine: sglang\n");
    assert_eq!(flow(&of_engine), (Flow::Aggregated, Connector::None));
    let selected = format!("{aggregated}    request_flows: [prefill_first]\n");
    assert_eq!(flow(&selected), (Flow::Aggregated, Connector::Nixl));
    let mixed = "    workers: ['http://w:1']\n    prefill: ['http://p:1']\n";
    assert_eq!(flow(mixed), (Flow::DecodeFirst, Connector::Nixl));
    let found = "    discovery:\n    - { kind: dns, name: p.x, port: 1, role: prefill }\n    \
                 - { kind: kubernetes, selector: a, port: 1, role: decode }\n";
    assert_eq!(flow(found), (Flow::DecodeFirst, Connector::Nixl));
}

#[test]
fn a_flow_that_does_not_follow_must_be_written() {
    let with = |lines: &str| {
        told(&empty(), &format!("models:\n  - name: m\n    tokenizer: none\n{lines}"))
    };
    for (lines, expected) in [
        (
            "    discovery: [{ kind: shim }]\n",
            "2:5 `models[0]` has no `flow`, and some of its workers no role -> add `flow:`",
        ),
        (
            "    decode: ['http://d:1']\n",
            "4:13 `models[0]` has no `flow`, and only workers for decode -> add `prefill:`",
        ),
        (
            "    prefill: ['http://p:1']\n",
            "4:14 `models[0].workers` has no worker with role decode or both -> add its URL under `decode:`",
        ),
        (
            "    aliases: []\n",
            "2:5 `models[0]` has no `workers`, and no `discovery` to find any -> add the engines' URLs",
        ),
    ] {
        let told = with(lines);
        assert!(told.len() == 1 && told[0].starts_with(expected), "{lines}: {told:#?}");
    }
}

#[test]
fn a_tokenizer_is_a_folder_or_the_id_of_a_cached_model() {
    let (folder, hub) = cache("org/model", &["tokenizer.json"]);
    let snapshot = folder.path().join("models--org--model/snapshots").join(COMMIT);
    let with = |tokenizer: &str| {
        format!("models: [{{ name: m, workers: ['http://w:1'], tokenizer: '{tokenizer}' }}]")
    };
    let snapshot_text = snapshot.display().to_string();
    for text in ["org/model", &snapshot_text] {
        assert_eq!(path_of(&model(&hub, &with(text))), Some(snapshot_text.clone()));
    }
    for (text, expected) in [
        ("/nowhere/else", "\"/nowhere/else\" does not exist -> write the model's folder"),
        ("../up", "\"../up\" does not exist"),
        ("", "\"\" does not exist"),
        ("a/b/c", "\"a/b/c\" does not exist"),
        (
            "org/other",
            "\"org/other\" is neither a folder nor in the Hugging Face cache -> `hf download org/other --exclude \"*.safetensors\"` on the router's host puts it into the cache",
        ),
    ] {
        let told = told(&hub, &with(text));
        assert!(told.len() == 1 && told[0].contains(expected), "{text}: {told:#?}");
    }
    let TokenizerConfig::Engine(engine) = model(&hub, &with("engine")).tokenizer else { panic!() };
    assert_eq!(engine, crate::model::EngineTokenizer::default());
    let lacking = told(&hub, &with(&folder.path().display().to_string()));
    assert!(lacking[0].contains("has no `tokenizer.json`"), "{lacking:?}");
    let (_folder, weights) = cache("org/model", &["model.safetensors"]);
    let lacking = told(&weights, &with("org/model"));
    assert!(
        lacking[0].contains("is cached without its `tokenizer.json` -> `hf download org/model "),
        "{lacking:?}"
    );
}

#[test]
fn the_engines_of_a_model_without_a_tokenizer_are_asked() {
    for name in ["Qwen/Qwen3-8B", "/models/none"] {
        let text = FIVE_LINES.replace("Qwen/Qwen3-8B", name);
        let loaded = read(&empty(), &text).unwrap();
        assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
        let told = loaded.notes.join("\n");
        assert!(told.contains("its engines are asked for the tokens of each prompt"), "{told}");
        assert_eq!(told.contains("`hf download Qwen/Qwen3-8B "), !name.starts_with('/'), "{told}");
        let model = &loaded.config.models[0];
        assert!(matches!(model.tokenizer, TokenizerConfig::Engine(_)));
        assert_eq!(model.flow, Flow::DecodeFirst);
        assert!(model.queue.is_some() && model.cache_loss_tracking.is_some());
    }
    // That none is wanted can be said.
    let text = format!("{FIVE_LINES}    tokenizer: none\n");
    let model = model(&empty(), &text);
    assert_eq!((path_of(&model), model.flow), (None, Flow::PrefillFirst));
    assert!(model.queue.is_none() && model.cache_loss_tracking.is_none());
}

#[test]
fn the_queue_comes_with_predictions_and_can_be_switched_off() {
    let (_folder, hub) = cache("Qwen/Qwen3-8B", &["tokenizer.json"]);
    let with = |lines: &str| model(&hub, &format!("{FIVE_LINES}{lines}"));
    assert!(with("    policy: { kind: predicted_ttft }\n").queue.is_some());
    assert!(with("    policy: { kind: round_robin }\n").queue.is_none());
    assert!(with("    policy: { kind: round_robin }\n    queue: {}\n").queue.is_some());
    let tracked = with("    policy: { kind: round_robin }\n").cache_loss_tracking;
    assert!(tracked.is_some(), "whatever the policy is");
    let off = with("    queue: none\n    cache_loss_tracking: none\n");
    assert!(off.queue.is_none() && off.cache_loss_tracking.is_none());
    let told = told(&hub, &format!("{FIVE_LINES}    queue: off\n"));
    assert!(told[0].starts_with("5:12 `models[0].queue` must be `none`, or a mapping"), "{told:?}");
}

#[test]
fn the_notes_name_features_that_other_keys_turn_off() {
    let (_folder, hub) = cache("Qwen/Qwen3-8B", &["tokenizer.json"]);
    let notes = |hub: &Hub, lines: &str| {
        let loaded = read(hub, &format!("{FIVE_LINES}{lines}")).unwrap();
        loaded.notes.join("\n")
    };
    assert!(!notes(&hub, "").contains(" off"));
    let other = "    policy: { kind: kv_overlap }\n";
    let told = notes(&hub, other);
    assert!(told.ends_with("; queue off: the policy is not predicted_ttft (`queue: {}` adds one)"));
    let blind = notes(&empty(), "    tokenizer: none\n");
    assert!(blind.ends_with("queue and cache_loss_tracking off: no tokenizer"), "{blind}");
    // What is written down needs no note.
    assert!(!notes(&hub, &format!("{other}    queue: none\n")).contains(" off"));
    let none = "    tokenizer: none\n    queue: none\n    cache_loss_tracking: none\n";
    assert!(!notes(&empty(), none).contains(" off"));
}

#[test]
fn the_cache_is_where_the_hub_library_has_it() {
    let of = |variables: &[(&str, &str)]| {
        let variables: Vec<_> = variables.to_vec();
        Hub::of(move |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
        .shown()
    };
    let home = ("HOME", "/h");
    assert_eq!(of(&[home]), "/h/.cache/huggingface/hub");
    assert_eq!(of(&[home, ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
    assert_eq!(of(&[home, ("HF_HOME", "/f")]), "/f/hub");
    assert_eq!(of(&[home, ("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), "/c");
    assert_eq!(of(&[]), "no folder");
}

#[test]
fn the_cache_is_never_left() {
    let (folder, hub) = cache("org/model", &["tokenizer.json"]);
    for id in ["", "/", "org", "org/", "../org/model", "org/..", "org/model/..", "a\\b", "org/mod*"]
    {
        assert_eq!(hub.find(id), CachedModel::Nothing, "{id}");
    }
    for reference in ["../../secrets", "", " ", "a/b", &"a".repeat(200)] {
        fs::write(folder.path().join("models--org--model/refs/main"), reference).unwrap();
        assert_eq!(hub.find("org/model"), CachedModel::Nothing, "{reference}");
    }
}

proptest! {
    #[test]
    fn an_id_names_no_other_folder(text in ".{0,40}") {
        if is_id(&text) {
            let name = format!("models--{}", text.replace('/', "--"));
            prop_assert_eq!(Path::new(&name).components().count(), 1);
        }
    }
}
