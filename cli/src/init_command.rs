//! `splitrail init`: writes a configuration file to start from.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use splitrail_settings::command::{Failure, exit, print_text};
use splitrail_settings::endpoint;
use splitrail_settings::variables::escaped;

/// The example, of which a new file has everything above the models.
const EXAMPLE: &str = include_str!("../../deploy/splitrail.example.yaml");

/// The output that is not a file.
const STDOUT: &str = "-";

/// The arguments.
#[derive(Args)]
pub(crate) struct InitArgs {
    /// The model, as the engines call it (`--served-model-name`).
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The address of a prefill engine; repeatable, and separable by commas.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        value_parser = engine,
        requires_all = ["decode", "model"]
    )]
    prefill: Vec<String>,
    /// The address of a decode engine; repeatable, and separable by commas.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        value_parser = engine,
        requires_all = ["prefill", "model"]
    )]
    decode: Vec<String>,
    /// The address of an engine that serves whole requests; repeatable, and separable by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = engine, requires = "model")]
    worker: Vec<String>,
    /// The folder with the model's `tokenizer.json`, which KV routing needs, or `engine` (engines are
    /// asked for tokens), or `none`. Without it, the router looks the name of the model up in the
    /// Hugging Face cache of its host.
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// The file to write; `-` for standard output.
    #[arg(long, value_name = "FILE", default_value = "splitrail.yaml")]
    output: PathBuf,
    /// Overwrites the file if it exists.
    #[arg(long)]
    force: bool,
}

/// The engines of the file: the key of each list, and its URLs.
type Engines = [(&'static str, Vec<String>); 3];

/// Writes the file.
///
/// # Errors
/// The file exists or cannot be written, or what the flags say is not a configuration.
pub(crate) fn run(args: InitArgs) -> Result<(), Failure> {
    let (path, force) = (args.output.clone(), args.force);
    let shown = path.display().to_string();
    let text = text(args, &shown)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    splitrail_config::parse(&shown, &text, folder.unwrap_or(Path::new("."))).map_err(
        |problems| {
            let message = format!("the file would not be valid; nothing was written\n{problems}");
            Failure::new(exit::CONFIG, message)
        },
    )?;
    if shown == STDOUT {
        return print_text(text.as_bytes());
    }
    write(&path, &text, force).map_err(|error| {
        let message = match error.kind() {
            io::ErrorKind::AlreadyExists => {
                format!("{shown} exists already\n  hint: --force overwrites it, --output names another file")
            }
            _ => format!("cannot write {shown}: {error}"),
        };
        Failure::new(exit::IO_ERROR, message)
    })?;
    let next = format!(
        "{shown}: written\n\nTo check it, and to run the router:\n\n  splitrail check --config {shown}\n  \
         splitrail serve --config {shown}\n"
    );
    print_text(next.as_bytes())
}

fn write(path: &Path, text: &str, force: bool) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    match force {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    options.open(path)?.write_all(text.as_bytes())
}

/// The text of the file, which is called `name`.
fn text(args: InitArgs, name: &str) -> Result<String, Failure> {
    let name = if name == STDOUT { "FILE" } else { name };
    let is_example = args.prefill.is_empty() && args.worker.is_empty();
    let absolute = |path: PathBuf| match path.to_str() {
        Some("engine" | "none") => Ok(path),
        _ => std::path::absolute(path),
    };
    let tokenizer = args.tokenizer.map(absolute).transpose()?;
    let example = |url: &str| vec![url.to_owned()];
    let engines: Engines = match is_example {
        true => [
            ("prefill", example("http://10.0.0.1:8000")),
            ("decode", example("http://10.0.1.1:8000")),
            ("workers", Vec::new()),
        ],
        false => [("prefill", args.prefill), ("decode", args.decode), ("workers", args.worker)],
    };
    let mut text = format!(
        "# Written by `splitrail init`. Check it with: splitrail check --config {name}\n\
         # All keys: docs/configuration.md, or `splitrail schema --markdown`.\n"
    );
    if is_example {
        text +=
            "# Only the name of the model and the addresses of its engines need to be changed.\n";
    }
    text += "\n";
    text += settings();
    text += "models:\n";
    model(&mut text, args.model.as_deref().unwrap_or("qwen3-8b"), tokenizer.as_deref(), &engines);
    Ok(text)
}

/// What the example has for the router as a whole: from the listeners to the models.
fn settings() -> &'static str {
    let start = EXAMPLE.find("listen:").unwrap_or_default();
    let end = EXAMPLE.find("\nmodels:").map_or(EXAMPLE.len(), |end| end + 1);
    &EXAMPLE[start..end]
}

/// Writes one entry of `models`. What it leaves out is asked of the engines or follows from their
/// roles.
fn model(text: &mut String, name: &str, tokenizer: Option<&Path>, engines: &Engines) {
    // Writing to a string does not fail.
    let _infallible = write!(
        text,
        "  - name: {}    # as the engines call it (--served-model-name)\n    \
         # aliases: [default]      # what clients may call it as well\n",
        scalar(name)
    );
    for (key, urls) in engines.iter().filter(|(_, urls)| !urls.is_empty()) {
        let _infallible = writeln!(text, "    {key}:");
        for url in urls {
            let _infallible = writeln!(text, "      - {}", scalar(url));
        }
    }
    *text += &match tokenizer {
        Some(path) => format!("    tokenizer: {}\n", scalar(&path.display().to_string())),
        None => "    # The folder with tokenizer.json. Without this line, the name of the model is looked up\n    \
                 # in the Hugging Face cache of this host; KV routing needs one of them.\n    \
                 # `engine` asks the engines instead, which takes a round trip for each prompt.\n    \
                 # tokenizer: /models/MODEL\n"
            .to_owned(),
    };
}

/// A text as a YAML scalar.
fn scalar(text: &str) -> String {
    let text = escaped(text);
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._/:-".contains(c))
        && !text.ends_with(':')
        && !["true", "false", "null"].contains(&&*text.to_ascii_lowercase());
    match is_plain {
        true => text.into_owned(),
        // JSON is YAML.
        false => serde_json::Value::from(&*text).to_string(),
    }
}

/// An engine's address; without a scheme, it is one of `http`.
fn engine(text: &str) -> Result<String, String> {
    let text = text.trim().trim_end_matches('/');
    let url = match text.contains("://") {
        true => endpoint::parse_http(text),
        false => endpoint::parse_http(&format!("http://{text}")),
    };
    url.map_err(|(why, _)| format!("the address {why}: write HOST:PORT or http://HOST:PORT"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
    }

    #[test]
    fn an_address_may_leave_out_its_scheme() {
        assert_eq!(engine("10.0.0.1:8000").unwrap(), "http://10.0.0.1:8000");
        assert_eq!(engine("https://e:8443/").unwrap(), "https://e:8443");
        assert!(engine("http://u:secret@e:1").unwrap_err().contains("user or password"));
    }
}
