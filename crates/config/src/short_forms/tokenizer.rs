//! The short forms of `tokenizer` (a folder, a model's id, `engine`, `none`), and the tokenizer of a
//! model that has no such key.

use std::path::Path;

use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};
use splitrail_settings::words::shown;

use super::hub::{CachedModel, Hub, is_id};

/// What the text form of `tokenizer` can name, for hints.
const FORMS: &str = "the model's folder, or its id if it is in the Hugging Face cache of this host";

/// The tokenizer that needs no files, for hints.
const ENGINE: &str = "`tokenizer: engine` asks the engines for the tokens of each prompt";

/// Writes the tokenizer of `model` out as a mapping. A model without one gets that of its name, if
/// the cache has it; otherwise its engines are asked. Returns what was derived.
pub(super) fn expand(
    model: &mut Node,
    path: &str,
    base_dir: &Path,
    hub: &Hub,
    report: &mut ProblemReport,
) -> Option<String> {
    let path = format!("{path}.tokenizer");
    match model.get("tokenizer").map(|node| (node.at, node.text().map(str::to_owned))) {
        Some((at, Some(text))) => {
            let found = by_text(&text, &path, base_dir, hub);
            match found {
                Ok(tokenizer) => model.insert("tokenizer", tokenizer.node(at)),
                Err((message, hint)) => report.error(at, message, hint),
            }
            None
        }
        Some((_, None)) => None,
        None => by_name(model, hub),
    }
}

/// A tokenizer as the configuration writes it.
enum Tokenizer {
    Folder(String),
    Engine,
    None,
}

impl Tokenizer {
    fn node(self, at: splitrail_settings::problem::Place) -> Node {
        let text = |text: String| Node::new(at, Value::Str(text));
        let mut node = Node::new(at, Value::Map(Vec::new()));
        match self {
            Self::Folder(path) => {
                node.insert("kind", text("huggingface".to_owned()));
                node.insert("path", text(path));
            }
            Self::Engine => node.insert("kind", text("engine".to_owned())),
            Self::None => node.insert("kind", text("none".to_owned())),
        }
        node
    }
}

/// The tokenizer that a text names, or what is wrong with the text, and a hint.
fn by_text(
    text: &str,
    path: &str,
    base_dir: &Path,
    hub: &Hub,
) -> Result<Tokenizer, (String, String)> {
    let name = shown(text);
    match text {
        "none" => return Ok(Tokenizer::None),
        "engine" => return Ok(Tokenizer::Engine),
        _ => {}
    }
    let place = base_dir.join(text);
    if !text.is_empty() && place.exists() {
        return match place.is_dir() && !place.join("tokenizer.json").is_file() {
            false => Ok(Tokenizer::Folder(text.to_owned())),
            true => {
                let message = format!("`{path}` \"{name}\" has no `tokenizer.json`");
                Err((message, format!("write {FORMS}")))
            }
        };
    }
    if !is_id(text) {
        let hint = format!("write {FORMS}; relative paths start at the configuration's folder");
        return Err((format!("`{path}` \"{name}\" does not exist"), hint));
    }
    let remedy = || format!("{}; or write the model's folder; {ENGINE}", download(&name, hub));
    match hub.find(text) {
        CachedModel::Tokenizer(folder) => Ok(Tokenizer::Folder(folder.display().to_string())),
        CachedModel::NoTokenizer(folder) => {
            let folder = folder.display();
            let message = format!("`{path}` \"{name}\" is cached without its `tokenizer.json`");
            Err((message, format!("{} ({folder} lacks it)", remedy())))
        }
        CachedModel::Nothing => {
            let message =
                format!("`{path}` \"{name}\" is neither a folder nor in the Hugging Face cache");
            Err((message, remedy()))
        }
    }
}

/// What is to be done for a model that is not cached.
fn download(name: &str, hub: &Hub) -> String {
    format!(
        "`hf download {name} --exclude \"*.safetensors\"` on the router's host puts it into the \
         cache ({})",
        hub.shown()
    )
}

/// Gives a model without a tokenizer the one of its name, or has its engines asked.
fn by_name(model: &mut Node, hub: &Hub) -> Option<String> {
    let (at, name) = model.get("name").and_then(|node| Some((node.at, node.text()?.to_owned())))?;
    let folder = match hub.find(&name) {
        CachedModel::Tokenizer(folder) => Some(folder),
        // Engines that are started with a folder serve the model under the folder's path.
        _ => Some(Path::new(&name).to_owned())
            .filter(|path| path.is_absolute() && path.join("tokenizer.json").is_file()),
    };
    let Some(folder) = folder else {
        model.insert("tokenizer", Tokenizer::Engine.node(at));
        let name = shown(&name);
        // A name without an organisation is rarely one of the hub.
        let remedy = match is_id(&name) && name.contains('/') {
            true => download(&name, hub),
            false => format!("`tokenizer:`, {FORMS}, says where it is"),
        };
        return Some(format!(
            "its engines are asked for the tokens of each prompt, because no tokenizer of that name \
             is here; with one, requests are faster: {remedy}"
        ));
    };
    let folder = folder.display().to_string();
    let note = format!("its tokenizer is {folder}");
    model.insert("tokenizer", Tokenizer::Folder(folder).node(at));
    Some(note)
}
