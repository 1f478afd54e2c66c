//! The documentation and the examples of the configuration are true.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use splitrail_config::{BlockSize, CachedTokensFallback, Connector, OnNoPrefill, Policy};

use crate::support::{folder, parse};

const MINIMAL: &str = "\
models:
  - name: m
    tokenizer: { kind: none }
    flow: aggregated
    workers: [{ id: w, role: both, url: 'http://w:1' }]
";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

#[test]
fn the_documentation_holds_the_reference_of_all_keys() {
    let document = fs::read_to_string(repository().join("docs/configuration.md")).unwrap();
    let reference = splitrail_config::reference_markdown();
    if !document.contains(&reference) {
        let expected = Path::new(env!("CARGO_TARGET_TMPDIR")).join("configuration-reference.md");
        fs::write(&expected, reference).unwrap();
        panic!(
            "docs/configuration.md is out of date: replace its table by the output of \
             `splitrail schema --markdown`, which is also in {}",
            expected.display()
        );
    }
}

#[test]
fn the_documentation_lists_the_fields_that_engines_are_sent() {
    let document = fs::read_to_string(repository().join("docs/fields.md")).unwrap();
    let reference = splitrail_engine::fields::reference_markdown();
    if !document.contains(&reference) {
        let expected = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fields-reference.md");
        fs::write(&expected, reference).unwrap();
        panic!("docs/fields.md is out of date: replace its tables by {}", expected.display());
    }
}

#[test]
fn every_example_is_valid() {
    let mut examples = Vec::new();
    let folder_of = |name| fs::read_dir(repository().join(name)).unwrap();
    for file in folder_of("deploy") {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            examples.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
    let document = fs::read_to_string(repository().join("docs/configuration.md")).unwrap();
    for block in document.split("```yaml\n").skip(1) {
        let text = block.split("```").next().unwrap();
        examples.push(("docs/configuration.md".to_owned(), text.to_owned()));
    }
    assert!(examples.len() >= 2);
    for (name, text) in examples {
        let text = text.replace("/models/qwen3-8b", "tokenizer");
        let secrets =
            ["/run/secrets/splitrail-fleet/prefill", "/run/secrets/splitrail-fleet/decode"];
        let text = secrets.iter().fold(text, |text, secret| text.replace(secret, "engine.key"));
        let loaded = match splitrail_config::parse(&name, &text, &folder()) {
            Ok(loaded) => loaded,
            Err(problems) => panic!("{problems}"),
        };
        // As `/admin/config` shows it: with every default written out.
        let written = serde_json::to_string_pretty(&loaded.config).unwrap();
        let again = match splitrail_config::parse(&name, &written, &folder()) {
            Ok(again) => again,
            Err(problems) => panic!("{problems}\n{written}"),
        };
        let messages = |loaded: &splitrail_config::LoadedConfig| {
            let messages = loaded.warnings.iter().map(|warning| warning.message.clone());
            // What is written out says that no tokenizer is wanted.
            let messages = messages.filter(|message| !message.starts_with("KV-aware routing"));
            messages.collect::<BTreeSet<_>>()
        };
        assert_eq!(messages(&again), messages(&loaded), "{name}");
    }
}

/// The YAML files of a folder and of the folders in it.
fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => yaml_files(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .collect()
}

#[test]
fn no_file_to_deploy_brings_a_hash_seed_that_everyone_knows() {
    let files = yaml_files(&repository().join("deploy"));
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let seed = text.lines().find(|line| line.trim_start().starts_with("hash_seed:"));
        assert_eq!(seed, None, "{}", file.display());
    }
}

#[test]
fn every_source_that_the_documentation_shows_is_valid() {
    let document = fs::read_to_string(repository().join("docs/discovery.md")).unwrap();
    let blocks = document.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let sources: Vec<_> = blocks.filter(|block| block.starts_with("discovery:")).collect();
    assert!(sources.len() >= 3);
    for source in sources {
        let lines: String = source.lines().map(|line| format!("    {line}\n")).collect();
        if let Err(problems) = parse(&format!("{MINIMAL}{lines}")) {
            panic!("{problems}\n{source}");
        }
    }
}

#[test]
fn a_minimal_file_gets_the_defaults() {
    let loaded = parse(MINIMAL).unwrap();
    assert!(loaded.warnings.is_empty());
    let config = loaded.config;
    assert_eq!(config.listen.http.address.to_string(), "0.0.0.0:8000");
    assert_eq!(config.listen.grpc, None);
    assert_eq!(config.listen.admin.address.to_string(), "127.0.0.1:9090");
    assert_eq!(config.hash_seed, 0);
    assert_eq!(config.limits.body_max_bytes, 33_554_432);
    assert_eq!(config.limits.drain_grace, Duration::from_secs(30));
    let model = &config.models[0];
    assert!(model.aliases.is_empty() && model.adapters.is_empty());
    assert_eq!(model.block_size, BlockSize::Auto);
    assert_eq!(model.connector, Connector::None);
    assert_eq!(model.local_prefill_max_tokens, 0);
    assert_eq!(model.on_no_prefill, OnNoPrefill::Local);
    assert_eq!(model.cached_tokens_fallback, CachedTokensFallback::Estimate);
    assert_eq!(model.policy, Policy::predicted_ttft());
    assert_eq!((model.retries.prefill, model.retries.decode), (2, 1));
    assert_eq!(model.timeouts.connect, Duration::from_secs(2));
    assert_eq!(model.timeouts.first_token, Duration::from_secs(60));
    assert_eq!(model.timeouts.reply, Duration::from_secs(600));
    assert!(model.engine_api_key.is_none());
    assert_eq!(model.workers[0].kv_events, None);
}

/// Writes every default that the documentation states into a file, which must then
/// mean the same as one that leaves those keys out.
/// The section that a key of listeners, credentials or tenants needs in order to be there.
fn access_section(path: &str) -> String {
    if path.starts_with("auth[].") {
        return "auth: [ { kind: jwt, issuer: i, audience: a, jwks: 'https://i/keys' } ]\n"
            .to_owned();
    }
    if path.starts_with("quotas.") && path != "quotas.share" {
        return "quotas: { kind: nats, servers: ['nats://a:1'] }\n".to_owned();
    }
    if path.starts_with("tracing.otlp.") {
        return "tracing: { otlp: { endpoint: 'http://c:4317' } }\n".to_owned();
    }
    if path.starts_with("tenants[].") {
        return "tenants: [ { name: acme } ]\n".to_owned();
    }
    let listeners = ["http", "grpc", "admin", "metrics"].into_iter();
    let mut of_tls = listeners.filter(|name| path.starts_with(&format!("listen.{name}.tls.")));
    let listen = of_tls.next().map(|name| {
        let tls = "tls: { cert: tls/router.pem, key: tls/router.key }";
        format!("listen: {{ {name}: {{ address: 127.0.0.1:1, {tls} }} }}\n")
    });
    listen.unwrap_or_default()
}

#[test]
fn every_documented_default_is_the_default() {
    let document = fs::read_to_string(repository().join("docs/configuration.md")).unwrap();
    let text =
        MINIMAL.replace("flow: aggregated", "flow: aggregated\n    policy: { kind: POLICY }");
    let base = |policy: &str| {
        let text = text.replace("POLICY", policy).replace(
            "tokenizer: { kind: none }",
            "tokenizer: { kind: huggingface, path: tokenizer }",
        );
        text.replace("'http://w:1'", "'http://w:1', kv_events: 'tcp://w:2'")
    };
    let mut stated = 0;
    for row in document.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let path = cells[0].trim_matches(['|', ' ', '`']);
        // Other tables than the reference have fewer columns.
        let default = cells.get(3).and_then(|_| cells[2].strip_prefix('`')?.strip_suffix('`'));
        let Some(default) = default else { continue };
        stated += 1;
        let policy = if path.contains(".policy.") { "kv_overlap" } else { "predicted_ttft" };
        let mut text = base(policy);
        // A key of one kind of source needs one of that kind.
        if let Some((_, source)) =
            SOURCES.iter().find(|(mark, _)| cells[3].contains(mark) && path.contains("discovery[]"))
        {
            text.push_str(source);
        }
        // What is there only if it is asked for has its defaults then.
        if path.contains("[].cache_loss_tracking.") {
            text =
                text.replace("flow: aggregated", "flow: aggregated\n    cache_loss_tracking: {}");
        }
        if path.contains("[].queue.") {
            text = text.replace("flow: aggregated", "flow: aggregated\n    queue: {}");
        }
        if path.contains("[].tokenizer.") && cells[3].contains("(`kind: engine`)") {
            let files = "{ kind: huggingface, path: tokenizer }";
            text = text.replace(files, "{ kind: engine }");
        }
        if path.contains("[].workers[].costs.") {
            text = text.replace("kv_events: 'tcp://w:2'", "kv_events: 'tcp://w:2', costs: {}");
        }
        if path.starts_with("fleet.tls.") {
            text.push_str("fleet: { tls: { cert: tls/router.pem, key: tls/router.key } }\n");
        }
        text.push_str(&access_section(path));
        if path.ends_with("[].workers") && !path.starts_with("fleet.") {
            let (start, _workers) = text.split_once("    workers:").unwrap();
            text = format!("{start}{}", SOURCES[0].1);
        }
        let without = parse(&text).unwrap().config;
        let without = serde_json::to_value(without).unwrap();
        let mut with = without.clone();
        let default = as_json(default);
        *with.pointer_mut(&pointer(path)).unwrap_or_else(|| panic!("no {path}")) = default;
        assert_eq!(with, without, "{path}");
        // JSON is YAML: the file that states the default means the same.
        let again = parse(&with.to_string()).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(serde_json::to_value(again.config).unwrap(), without, "{path}");
    }
    assert!(stated > 25, "only {stated} rows state a default");
}

/// How a row marks its kind of source, and the least such source.
const SOURCES: [(&str, &str); 2] = [
    ("(`kind: dns`)", "    discovery: [{ kind: dns, name: a.b, port: 1, role: both }]\n"),
    ("(`kind: kubernetes`)", "    discovery: [{ kind: kubernetes, selector: a, port: 1 }]\n"),
];

fn pointer(path: &str) -> String {
    format!("/{}", path.replace("[].", "/0/").replace('.', "/"))
}

/// The few forms that defaults are documented in.
fn as_json(text: &str) -> Value {
    let Some(members) = text.strip_prefix("{ ").and_then(|rest| rest.strip_suffix(" }")) else {
        return scalar(text);
    };
    let members = members.split(", ").filter_map(|member| member.split_once(": "));
    members.map(|(key, value)| (key.to_owned(), scalar(value))).collect()
}

fn scalar(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

#[test]
fn the_schema_allows_no_unknown_keys_and_explains_every_key() {
    fn visit(schema: &Value, place: &str) {
        if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
            assert_eq!(schema.get("additionalProperties"), Some(&Value::Bool(false)), "{place}");
            for (key, property) in properties {
                let explained = property.get("description").is_some() || key == "kind";
                assert!(explained, "{place}/{key} has no description");
            }
        }
        match schema {
            Value::Object(map) => {
                for (key, value) in map {
                    visit(value, &format!("{place}/{key}"));
                }
            }
            Value::Array(items) => {
                for (index, value) in items.iter().enumerate() {
                    visit(value, &format!("{place}/{index}"));
                }
            }
            _ => {}
        }
    }
    let schema = splitrail_config::schema();
    assert_eq!(schema["title"], "Splitrail configuration");
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    visit(&schema, "");
}
