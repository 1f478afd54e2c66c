//! `splitrail init`: writes a configuration file to start from. What engines can tell is asked of them.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use splitrail_config::{ConfigText, Parts};
use splitrail_settings::command::{Failure, exit, print_text};

use crate::download;

mod engines;
mod served_model;
mod sources;
mod text;

use engines::EngineAddress;
use sources::{Pods, PodsRole, Shims};
use text::{Content, Source};

/// The output that is not a file.
const STDOUT: &str = "-";
/// The file with the token of shims, beside the configuration.
const TOKEN_FILE: &str = "fleet.token";

/// The arguments.
#[derive(Args)]
pub(crate) struct InitArgs {
    /// The model, as the engines call it (`--served-model-name`). Without it, the engines that are
    /// named are asked.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The address of a prefill engine, or `dns://NAME:PORT` for all addresses of a DNS name;
    /// repeatable, and separable by commas.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        value_parser = EngineAddress::parse,
        requires = "decode"
    )]
    prefill: Vec<EngineAddress>,
    /// The address of a decode engine; likewise.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        value_parser = EngineAddress::parse,
        requires = "prefill"
    )]
    decode: Vec<EngineAddress>,
    /// The address of an engine that serves whole requests; likewise.
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = EngineAddress::parse)]
    worker: Vec<EngineAddress>,
    /// Finds engines among the pods of the router's Kubernetes namespace: those with these labels, for
    /// example `app=vllm`.
    #[arg(long, value_name = "SELECTOR", requires = "model")]
    kubernetes: Option<String>,
    /// The namespace of the pods, if it is not that of the router.
    #[arg(long, value_name = "NAME", requires = "kubernetes")]
    namespace: Option<String>,
    /// The port of the pods' engines, or of their shims: a number, or the name of a container's port.
    #[arg(long, value_name = "PORT", requires = "kubernetes", default_value = "8000")]
    port: String,
    /// The role of all these pods. Without it, each pod's label `splitrail.io/role` names its role.
    #[arg(long, value_name = "ROLE", requires = "kubernetes", value_enum)]
    role: Option<PodsRole>,
    /// Lets engines with shims attach themselves: opens a listener for them, and writes a token for
    /// them into `fleet.token` beside the file.
    #[arg(long, requires = "model", conflicts_with = "nats")]
    shims: bool,
    /// Takes the reports of shims from a NATS broker, `nats://HOST:PORT` or `tls://HOST:PORT`;
    /// separable by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', requires = "model")]
    nats: Vec<String>,
    /// The folder with the model's `tokenizer.json`, which KV routing needs, or the model's id in the
    /// Hugging Face cache of this host, or `engine` (engines are asked for tokens), or `none`. Without
    /// it, the router looks the name of the model up in that cache.
    #[arg(long, value_name = "FOLDER|ID")]
    tokenizer: Option<String>,
    /// Fetches the model's tokenizer from the Hugging Face hub, as for `check`.
    #[arg(long)]
    download: bool,
    /// The file to write; `-` for standard output.
    #[arg(long, value_name = "FILE", default_value = "splitrail.yaml")]
    output: PathBuf,
    /// Overwrites the file if it exists.
    #[arg(long)]
    force: bool,
}

/// Writes the file.
///
/// # Errors
/// The file exists or cannot be written, what the flags say is not a configuration, or engines that
/// are to be asked do not reply.
pub(crate) async fn run(args: InitArgs) -> Result<(), Failure> {
    let (path, force, downloads) = (args.output.clone(), args.force, args.download);
    let shown = path.display().to_string();
    if !force && shown != STDOUT && path.exists() {
        return Err(unwritten(&shown, &io::ErrorKind::AlreadyExists.into()));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let token = match args.shims {
        true => Some(token(folder, shown == STDOUT)?),
        false => None,
    };
    let text = text::text(&content(args, token.is_some()).await?, &shown);
    let checked = ConfigText::new(&shown, text.clone(), folder);
    if let Err(why) = download::load(&checked, Parts::ALL, downloads).await {
        // The token was made for this file.
        if token == Some(Token::Made) {
            let _gone = std::fs::remove_file(folder.join(TOKEN_FILE));
        }
        let problems = &why.problems;
        let message = format!("the file would not be valid; nothing was written\n{problems}");
        return Err(Failure::new(why.code(), message));
    }
    if shown == STDOUT {
        return print_text(text.as_bytes());
    }
    write(&path, &text, force).map_err(|error| unwritten(&shown, &error))?;
    let mut next = format!("{shown}: written\n");
    if let Some(token) = token {
        let place = folder.join(TOKEN_FILE);
        let what = if token == Token::Made { "written" } else { "kept as it was" };
        next += &format!(
            "{}: {what}; shims need this token, as SPLITRAIL_FLEET_TOKEN or in a file\n",
            place.display()
        );
    }
    next += &format!(
        "\nTo check it, and to run the router:\n\n  splitrail check --config {shown}\n  \
         splitrail serve --config {shown}\n"
    );
    print_text(next.as_bytes())
}

/// What was done with the file of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    /// The file existed and was not changed.
    Kept,
    /// The file was written.
    Made,
}

/// Makes the file with the token of shims in a folder, unless there is one.
fn token(folder: &Path, is_stdout: bool) -> Result<Token, Failure> {
    let place = folder.join(TOKEN_FILE);
    if place.exists() {
        return Ok(Token::Kept);
    }
    if is_stdout {
        let message = "--shims writes a token into a file beside the configuration, and standard \
                       output has none\n  hint: name a file by --output";
        return Err(Failure::new(exit::USAGE, message));
    }
    let token = splitrail_access::keys::random_text();
    let token = token.map_err(|error| Failure::new(exit::OS_ERROR, error.to_string()))?;
    let mut options = OpenOptions::new();
    // The group may be that of the router's service.
    options.write(true).create_new(true).mode(0o640);
    let written =
        options.open(&place).and_then(|mut file| file.write_all(format!("{token}\n").as_bytes()));
    written.map_err(|error| unwritten(&place.display().to_string(), &error))?;
    Ok(Token::Made)
}

/// What the file is to say, with what the engines say.
async fn content(args: InitArgs, has_token: bool) -> Result<Content, Failure> {
    let named = [&args.prefill, &args.decode, &args.worker].into_iter().flatten();
    let named: Vec<EngineAddress> = named.cloned().collect();
    let pods = args.kubernetes.map(|selector| Pods {
        selector,
        namespace: args.namespace,
        port: args.port,
        role: args.role,
    });
    let shims = match (has_token, args.nats.is_empty()) {
        (true, _) => Some(Shims::Direct),
        (false, false) => Some(Shims::Nats(args.nats)),
        (false, true) => None,
    };
    let source = match named.is_empty() && pods.is_none() && shims.is_none() {
        true => Source::Example,
        false => Source::Named {
            prefill: args.prefill,
            decode: args.decode,
            workers: args.worker,
            pods,
            shims,
        },
    };
    let (model, aliases) = match args.model {
        Some(model) => (Some(model), Vec::new()),
        None if named.is_empty() => (None, Vec::new()),
        None => {
            let served = served_model::ask(&named).await?;
            (Some(served.name), served.aliases)
        }
    };
    let tokenizer = args.tokenizer.map(|text| tokenizer(&text)).transpose()?;
    Ok(Content { model, aliases, tokenizer, source })
}

/// A tokenizer as the file has it: folders are absolute, because the file may be elsewhere.
fn tokenizer(text: &str) -> io::Result<String> {
    let is_id = text.split('/').count() <= 2 && !text.starts_with(['/', '.']);
    match is_id && !Path::new(text).exists() {
        true => Ok(text.to_owned()),
        false => Ok(std::path::absolute(text)?.display().to_string()),
    }
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

fn unwritten(shown: &str, error: &io::Error) -> Failure {
    let message = match error.kind() {
        io::ErrorKind::AlreadyExists => {
            format!(
                "{shown} exists already\n  hint: --force overwrites it, --output names another file"
            )
        }
        _ => format!("cannot write {shown}: {error}"),
    };
    Failure::new(exit::IO_ERROR, message)
}
