//! A client's body at each endpoint: what is read, edited and removed of it leaves no field for
//! engines that clients must not set, and everything else as it was.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use serde_json::Value;
use splitrail_api::error::Error;
use splitrail_api::memory_budget::{Allowance, MemoryBudget, Meter, full};
use splitrail_api::{Endpoint, Inbound, JsonObject};
use splitrail_config::Limits;

/// The engines' request classes, and the fields of theirs that no client's request may hold.
static ENGINES: LazyLock<Value> = LazyLock::new(|| {
    let text = include_str!("../../tests/fixtures/engine_fields.json");
    serde_json::from_str(text).expect("JSON")
});

/// Objects whose members engines read as if they stood at the top level.
const CARRIERS: [&str; 4] = ["sampling_params", "vllm_xargs", "extra_args", "custom_params"];

fn is_held_back(name: &str) -> bool {
    name.starts_with("bootstrap_") || !ENGINES["held_back"][name].is_null()
}

/// Whether an engine has the field at this endpoint, and clients may set it.
fn is_known(endpoint: Endpoint, name: &str) -> bool {
    let engines = ENGINES["engines"].as_array().into_iter().flatten();
    let mut requests = engines.flat_map(|engine| engine["requests"].as_array()).flatten();
    let known = requests.any(|request| {
        let mut fields = request["fields"].as_array().into_iter().flatten();
        request["endpoint"] == endpoint.name() && fields.any(|field| field == name)
    });
    known && !is_held_back(name)
}

pub(crate) fn check(body: &[u8]) {
    let body = Bytes::copy_from_slice(body);
    if let Ok(object) = JsonObject::parse(body.clone()) {
        edits_read_back(object);
    }
    let limits = Limits { batch_prompts_max: 4, n_max: 8, stop_max: 2, ..Limits::default() };
    for endpoint in Endpoint::ALL {
        match parse(endpoint, body.clone(), &limits) {
            Ok(inbound) => accepted(&inbound, &body, &limits),
            Err(error) => {
                assert_eq!(error.status(), 400, "{error}");
                let told: Value = serde_json::from_str(&error.to_openai()).expect("JSON");
                assert!(told["error"]["message"].is_string(), "{told}");
            }
        }
    }
}

fn parse(endpoint: Endpoint, text: Bytes, limits: &Limits) -> Result<Inbound, Error> {
    let body = JsonObject::parse_strictly(text, limits.object_members_max, |_| Ok(()))?;
    let charge = Arc::new(MemoryBudget::default()).charge();
    let mut work = Meter::new(charge, usize::MAX, &full);
    let allowance = Allowance { limits, work: &mut work };
    Inbound::read(endpoint, body, None, allowance, |_| &[])
}

fn accepted(inbound: &Inbound, original: &Bytes, limits: &Limits) {
    let options = inbound.options;
    assert!((1..=limits.n_max).contains(&options.n) && options.samples >= options.n);
    let named = inbound.endpoint.dialect().names_events();
    assert!(options.stream || !options.include_usage);
    assert!((1..=limits.batch_prompts_max).contains(&inbound.prompts.len()));

    let sent = inbound.body.to_bytes();
    assert!(
        JsonObject::parse_strictly(sent.clone(), limits.object_members_max, |_| Ok(())).is_ok(),
        "an engine is sent what a client may send"
    );
    let value: Value = serde_json::from_slice(&sent).expect("an engine is sent JSON");
    assert!(is_clean(&value), "{value}");
    assert_eq!(value["model"].as_str().unwrap_or_default(), inbound.model_name);
    assert_eq!(value["cache_salt"].as_str(), inbound.cache_salt.as_deref());
    // What generates nothing streams nothing either, whatever a client writes there.
    if inbound.endpoint.generates() {
        assert_eq!(value["stream"].as_bool().unwrap_or(false), options.stream);
        let asked = value["stream_options"]["include_usage"].as_bool().unwrap_or(false);
        assert!(named || asked == options.include_usage, "{value}");
    }
    let kept_nowhere = inbound.endpoint == Endpoint::Responses;
    assert!(!kept_nowhere || value["store"] == false, "{value}");

    // Everything else is as the client wrote it, in its order, and no field is lost that an
    // engine has and a client may set.
    let original = JsonObject::parse(original.clone()).expect("it was accepted");
    let mut rest = original.members();
    for (key, raw) in inbound.body.members() {
        // Where a request of a response says nothing of it, the router does.
        if kept_nowhere && key == "store" && original.raw("store").is_none() {
            continue;
        }
        let kept_raw = loop {
            let (name, raw) = rest.next().expect("a member that nobody sent");
            if name == key {
                break raw;
            }
            assert!(!is_known(inbound.endpoint, name), "{name} was lost");
        };
        let router_s = CARRIERS.contains(&key) || key == "stream_options";
        assert!(raw == kept_raw || router_s || (kept_nowhere && key == "store"), "{key}: {raw}");
    }
    for (name, _) in rest {
        assert!(!is_known(inbound.endpoint, name), "{name} was lost");
    }

    let again = parse(inbound.endpoint, sent, limits);
    let again = again.expect("clean once, clean twice");
    assert_eq!(again.removed.header(), None);
    assert_eq!(again.body.to_bytes(), inbound.body.to_bytes());
}

/// No field that is held back stands where an engine reads it.
fn is_clean(value: &Value) -> bool {
    let Some(members) = value.as_object() else {
        return true;
    };
    !members.keys().any(|key| is_held_back(key))
        && CARRIERS.iter().all(|carrier| is_clean_throughout(&value[*carrier]))
}

/// The same of the objects of extensions, at any depth and in lists.
fn is_clean_throughout(value: &Value) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().all(|(key, value)| !is_held_back(key) && is_clean_throughout(value))
        }
        Value::Array(items) => items.iter().all(is_clean_throughout),
        _ => true,
    }
}

/// Members that are set, replaced and removed read back as such, and the others
/// as they were.
fn edits_read_back(mut object: JsonObject) {
    let pair = |(key, raw): (&str, &str)| (key.to_owned(), raw.to_owned());
    let mut model: Vec<_> = object.members().map(pair).collect();
    for (index, (key, _)) in model.clone().into_iter().enumerate() {
        match index % 4 {
            0 => {}
            1 => {
                let there = model.iter().any(|(name, _)| *name == key);
                assert_eq!(object.remove(&key), there);
                model.retain(|(name, _)| *name != key);
            }
            2 => set(&mut object, &mut model, &key, "[1 ,\"\\u00e9\"]"),
            _ => set(&mut object, &mut model, &format!("{key}\"\\\u{1}"), "{ }"),
        }
    }
    let again = JsonObject::parse(object.to_bytes()).expect("an edited object is an object");
    assert_eq!(again.members().map(pair).collect::<Vec<_>>(), model);
    assert_eq!(object.to_string().as_bytes(), object.to_bytes());
}

fn set(object: &mut JsonObject, model: &mut Vec<(String, String)>, key: &str, raw: &str) {
    object.set(key, raw);
    match model.iter_mut().find(|(name, _)| name == key) {
        Some((_, old)) => raw.clone_into(old),
        None => model.push((key.to_owned(), raw.to_owned())),
    }
}
