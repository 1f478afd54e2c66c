//! The text of a new file.

use std::fmt::Write as _;

use splitrail_settings::variables::escaped;

use super::engines::EngineAddress;
use super::sources::{Pods, Shims};
use super::{STDOUT, TOKEN_FILE};

/// The example, of which a new file has everything above the models.
const EXAMPLE: &str = include_str!("../../../deploy/splitrail.example.yaml");
/// The line before which a listener for shims belongs.
const BEFORE_METRICS: &str = "  # metrics:";

/// The content of a new file.
#[derive(Debug)]
pub(super) struct Content {
    /// The name of the model.
    pub(super) model: Option<String>,
    pub(super) aliases: Vec<String>,
    /// The tokenizer, as the file has it.
    pub(super) tokenizer: Option<String>,
    pub(super) source: Source,
}

/// Where the workers are.
#[derive(Debug)]
pub(super) enum Source {
    /// Example addresses, which are to be changed.
    Example,
    /// The engines that flags name.
    Named {
        prefill: Vec<EngineAddress>,
        decode: Vec<EngineAddress>,
        workers: Vec<EngineAddress>,
        pods: Option<Pods>,
        shims: Option<Shims>,
    },
}

/// Writes lines to a text, which does not fail.
macro_rules! put {
    ($text:expr, $($format:tt)*) => {
        let _infallible = writeln!($text, $($format)*);
    };
}

/// The text of the file, which is called `name`.
pub(super) fn text(content: &Content, name: &str) -> String {
    let name = if name == STDOUT { "FILE" } else { name };
    let mut text = format!(
        "# Written by `splitrail init`. Check it with: splitrail check --config {name}\n\
         # All keys: docs/configuration.md, or `splitrail schema --markdown`.\n"
    );
    if matches!(content.source, Source::Example) {
        text +=
            "# Only the name of the model and the addresses of its engines need to be changed.\n";
    }
    text += "\n";
    match &content.source {
        Source::Named { shims: Some(shims), .. } => text += &settings_with(shims),
        _ => text += settings(),
    }
    text += "models:\n";
    model(&mut text, content);
    text
}

/// The settings of the example that belong to no model: from the listeners to the models.
fn settings() -> &'static str {
    let start = EXAMPLE.find("listen:").unwrap_or_default();
    let end = EXAMPLE.find("\nmodels:").map_or(EXAMPLE.len(), |end| end + 1);
    &EXAMPLE[start..end]
}

/// The same settings, with a listener or a broker for shims.
fn settings_with(shims: &Shims) -> String {
    match shims {
        Shims::Direct => {
            let listener = "  fleet: 0.0.0.0:8002         # where shims attach\n";
            let mut text =
                settings().replacen(BEFORE_METRICS, &format!("{listener}{BEFORE_METRICS}"), 1);
            text += "# Shims show a token of this file; each line is one. Tokens for certain workers, and TLS:\n\
                     # docs/fleet.md.\n";
            put!(text, "fleet:\n  token: {{ kind: file, path: {TOKEN_FILE} }}\n");
            text
        }
        Shims::Nats(servers) => {
            let mut text = settings().to_owned();
            let servers: Vec<_> = servers.iter().map(|server| quoted(server)).collect();
            text += "# Shims report over this broker (docs/event-plane.md), whose JetStream is enabled.\n";
            put!(text, "events:\n  kind: nats\n  servers: [{}]", servers.join(", "));
            text += "  # login: { kind: user, name: splitrail, password: { kind: file, path: nats.password } }\n\n";
            text
        }
    }
}

/// Writes one entry of `models`. What it leaves out is asked of the engines or follows from their
/// roles.
fn model(text: &mut String, content: &Content) {
    let name = content.model.as_deref().unwrap_or("qwen3-8b");
    put!(text, "  - name: {}    # as the engines call it (--served-model-name)", scalar(name));
    match content.aliases.is_empty() {
        true => {
            put!(text, "    # aliases: [default]      # what clients may call it as well");
        }
        false => {
            let aliases: Vec<_> = content.aliases.iter().map(|alias| quoted(alias)).collect();
            put!(text, "    aliases: [{}]", aliases.join(", "));
        }
    }
    match &content.source {
        Source::Example => {
            *text += "    prefill:\n      - http://10.0.0.1:8000\n    decode:\n      - http://10.0.1.1:8000\n";
        }
        Source::Named { prefill, decode, workers, pods, shims } => {
            let lists = [
                ("prefill", "prefill", prefill),
                ("decode", "decode", decode),
                ("workers", "both", workers),
            ];
            listed(text, &lists);
            discovery(text, &lists, pods.as_ref(), shims.as_ref());
            let is_told = pods.as_ref().is_none_or(|pods| pods.role.is_some());
            if (!is_told || shims.is_some()) && prefill.is_empty() {
                flow(text, content.tokenizer.as_deref() == Some("none"));
            }
        }
    }
    *text += &match &content.tokenizer {
        Some(tokenizer) => format!("    tokenizer: {}\n", scalar(tokenizer)),
        None => "    # The folder with tokenizer.json. Without this line, the name of the model is looked up\n    \
                 # in the Hugging Face cache of this host; KV routing needs one of them.\n    \
                 # `engine` asks the engines instead, which takes a round trip for each prompt.\n    \
                 # tokenizer: /models/MODEL\n"
            .to_owned(),
    };
}

/// The lists of a model: the key, the role, and the addresses.
type Lists<'a> = [(&'static str, &'static str, &'a Vec<EngineAddress>); 3];

/// Writes the lists of engines with URLs.
fn listed(text: &mut String, lists: &Lists<'_>) {
    for (key, _, addresses) in lists {
        let urls = addresses.iter().filter_map(|address| match address {
            EngineAddress::Url(url) => Some(url),
            EngineAddress::Dns { .. } => None,
        });
        for (place, url) in urls.enumerate() {
            if place == 0 {
                put!(text, "    {key}:");
            }
            put!(text, "      - {}", scalar(url));
        }
    }
}

/// Writes the sources of engines that are not listed.
fn discovery(text: &mut String, lists: &Lists<'_>, pods: Option<&Pods>, shims: Option<&Shims>) {
    let mut sources = String::new();
    for (_, role, addresses) in lists {
        for address in *addresses {
            let EngineAddress::Dns { name, port } = address else { continue };
            put!(sources, "      - kind: dns    # each address of the name is an engine");
            put!(sources, "        name: {}", scalar(name));
            put!(sources, "        port: {port}\n        role: {role}");
        }
    }
    if let Some(pods) = pods {
        put!(
            sources,
            "      - kind: kubernetes    # the pods with these labels; the Role that this needs: docs/discovery.md"
        );
        put!(sources, "        selector: {}", quoted(&pods.selector));
        if let Some(namespace) = &pods.namespace {
            put!(sources, "        namespace: {}", scalar(namespace));
        }
        let is_number = pods.port.chars().all(|c| c.is_ascii_digit());
        let port = if is_number { pods.port.clone() } else { scalar(&pods.port) };
        put!(sources, "        port: {port}");
        match pods.role {
            Some(role) => {
                put!(sources, "        role: {}", role.name());
            }
            None => {
                put!(
                    sources,
                    "        # role: decode    # otherwise each pod's label splitrail.io/role: prefill, decode or both"
                );
            }
        }
        if shims.is_some() {
            put!(sources, "        shim: true    # `port` is that of the shims");
        }
    }
    if shims.is_some() {
        put!(sources, "      - kind: shim    # engines whose shims report to this router");
    }
    if !sources.is_empty() {
        put!(text, "    discovery:");
        *text += &sources;
    }
}

/// Writes the flow, which does not follow from roles that are known only when workers join.
fn flow(text: &mut String, is_blind: bool) {
    let flow = if is_blind { "prefill_first" } else { "decode_first" };
    put!(
        text,
        "    flow: {flow}    # or aggregated, if all engines do both parts; then delete `connector`"
    );
    put!(text, "    connector: nixl");
}

/// A text in quotes. JSON is YAML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(&*escaped(text)).to_string()
}

/// A text as a YAML scalar.
fn scalar(text: &str) -> String {
    let plain = escaped(text);
    let is_plain = plain.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && plain.chars().all(|c| c.is_ascii_alphanumeric() || "._/:-".contains(c))
        && !plain.ends_with(':')
        && !["true", "false", "null"].contains(&&*plain.to_ascii_lowercase());
    if is_plain { plain.into_owned() } else { quoted(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_quoted_where_they_would_be_something_else() {
        for (text, yaml) in [
            ("qwen3-8b", "qwen3-8b"),
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
            ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
            ("8b", "\"8b\""),
            ("true", "\"true\""),
            ("a: b", "\"a: b\""),
            ("${X}", "\"$${X}\""),
            ("say \"hi\"", "\"say \\\"hi\\\"\""),
        ] {
            assert_eq!(scalar(text), yaml);
        }
    }

    #[test]
    fn the_settings_are_those_of_the_example_without_its_models() {
        assert!(settings().starts_with("listen:\n") && settings().ends_with("\n\n"));
        assert!(!settings().contains("workers:"));
        assert!(settings_with(&Shims::Direct).contains("\n  fleet: 0.0.0.0:8002 "));
    }
}
