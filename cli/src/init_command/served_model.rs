//! Asks engines which model they serve.

use std::net::SocketAddr;
use std::time::Duration;

use http::{HeaderMap, Method};
use serde_json::Value;
use splitrail_config::model::EngineTls;
use splitrail_settings::command::{Failure, exit};
use tokio::net::lookup_host;

use super::engines::EngineAddress;
use crate::admin::{AdminAddress, Replica, client_tls};
use crate::safe_text::printable;

/// Maximum time for the reply of an engine.
const REPLY_TIME_MAX: Duration = Duration::from_secs(5);
/// Maximum number of engines that are asked: they all serve the same.
const ASKED_MAX: usize = 8;
/// Maximum number of names of a model.
const NAMES_MAX: usize = 16;
/// Maximum width of a name in messages.
const NAME_MAX_COLUMNS: usize = 200;

/// A model, as engines serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelNames {
    pub(super) name: String,
    /// Further names of it.
    pub(super) aliases: Vec<String>,
}

/// Asks the engines one after another until one says which model it serves.
///
/// # Errors
/// None does, or the one serves several.
pub(super) async fn ask(engines: &[EngineAddress]) -> Result<ModelNames, Failure> {
    let hint = "hint: is it running? Or name the model by --model, and nothing is asked";
    let mut first_error = None;
    for engine in engines.iter().take(ASKED_MAX) {
        match models(engine).await {
            Ok(listed) => return served(&listed),
            Err(why) => drop(first_error.get_or_insert(why)),
        }
    }
    let why = first_error.unwrap_or_else(|| "there is no engine to ask".to_owned());
    let message = format!("no engine says which model it serves: {why}\n  {hint}");
    Err(Failure::new(exit::UNAVAILABLE, message))
}

/// The reply of an engine to `/v1/models`.
async fn models(engine: &EngineAddress) -> Result<Value, String> {
    let (url, resolved) = match engine {
        EngineAddress::Url(url) => (url.clone(), None),
        EngineAddress::Dns { name, port } => {
            (format!("http://{name}:{port}"), Some(first_address(name, *port).await?))
        }
    };
    let address = AdminAddress::parse(&url)?;
    let tls = match address.is_tls() {
        true => {
            let tls = client_tls(&EngineTls::default(), |_| "--prefill");
            Some(tls.map_err(|failure| failure.message)?)
        }
        false => None,
    };
    let engine = Replica { address, resolved, tls, key: None, time_max: REPLY_TIME_MAX };
    let asked = engine.ask(Method::GET, "/v1/models", HeaderMap::new(), Default::default()).await;
    let reply = asked.map_err(|error| error.message().to_owned())?;
    match reply.status.as_u16() {
        200 => serde_json::from_slice(&reply.body)
            .map_err(|_| format!("{} is not an engine: its reply is not JSON", engine.name())),
        401 | 403 => Err(format!("{} asks for a key", engine.name())),
        status => {
            Err(format!("{} is not an engine: it replied with status {status}", engine.name()))
        }
    }
}

async fn first_address(name: &str, port: u16) -> Result<SocketAddr, String> {
    let found = lookup_host((name, port)).await;
    let found = found.map_err(|error| format!("{name} has no address: {error}"))?.next();
    found.ok_or_else(|| format!("{name} has no address"))
}

/// The model of a list. Adapters have a `parent`, and the names of one model the same `root`.
fn served(listed: &Value) -> Result<ModelNames, Failure> {
    let entries = listed["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let models: Vec<&Value> = entries.iter().filter(|entry| entry["parent"].is_null()).collect();
    let names = models.iter().filter_map(|entry| entry["id"].as_str());
    let mut names: Vec<String> = names.take(NAMES_MAX).map(str::to_owned).collect();
    let roots: Vec<_> = models.iter().map(|entry| entry["root"].as_str()).collect();
    let is_one = names.len() <= 1 || roots.iter().all(|root| root.is_some() && *root == roots[0]);
    if names.is_empty() || !is_one {
        let shown: Vec<_> = names.iter().map(|name| printable(name, NAME_MAX_COLUMNS)).collect();
        let message = match names.is_empty() {
            true => "the engine serves no model".to_owned(),
            false => format!("the engine serves several models: {}", shown.join(", ")),
        };
        let message = format!("{message}\n  hint: name one by --model");
        return Err(Failure::new(exit::DATA_ERROR, message));
    }
    let name = names.remove(0);
    Ok(ModelNames { name, aliases: names })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn further_names_of_the_model_are_aliases_and_adapters_are_not() {
        let listed = json!({"data": [
            {"id": "qwen3-8b", "root": "/models/qwen", "parent": null},
            {"id": "default", "root": "/models/qwen", "parent": null},
            {"id": "sql", "root": "/adapters/sql", "parent": "qwen3-8b"},
        ]});
        let expected = ModelNames { name: "qwen3-8b".into(), aliases: vec!["default".into()] };
        assert_eq!(served(&listed).unwrap(), expected);
        let alone = json!({"data": [{"id": "m"}]});
        assert_eq!(served(&alone).unwrap(), ModelNames { name: "m".into(), aliases: vec![] });
    }

    #[test]
    fn one_of_several_models_must_be_named() {
        for (listed, told) in [
            (
                json!({"data": [{"id": "a", "root": "a"}, {"id": "b", "root": "b"}]}),
                "several models: a, b",
            ),
            (json!({"data": [{"id": "a"}, {"id": "b"}]}), "several models: a, b"),
            (json!({"data": []}), "no model"),
            (json!([1]), "no model"),
        ] {
            let message = served(&listed).unwrap_err().message;
            assert!(message.contains(told) && message.contains("--model"), "{message}");
        }
    }
}
