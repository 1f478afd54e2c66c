//! `splitrail keys`: makes, lists and revokes API keys in a file of keys.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use splitrail_access::keys::{Grant, generate};
use splitrail_config::keys::{self, KeyEntry, KeysFile, OperatorRole};
use splitrail_settings::command::{Failure, exit};
use splitrail_settings::process::replace_whole;

use crate::named_value::named;

/// Manages the API keys of clients and operators.
#[derive(Args)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Subcommand)]
enum KeysCommand {
    /// Makes a key and prints it once; the file gets its hash only.
    New(NewArgs),
    /// Lists the keys of a file, without their hashes.
    List {
        /// The file of keys.
        #[arg(long)]
        file: PathBuf,
        /// Prints JSON.
        #[arg(long)]
        json: bool,
    },
    /// Deletes a key from a file. A running router refuses it within about a second.
    Revoke {
        /// The file of keys.
        #[arg(long)]
        file: PathBuf,
        /// The id of the key, as `list` shows it.
        id: String,
    },
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("grant").required(true))]
struct NewArgs {
    /// The tenant of requests with the key.
    #[arg(long, group = "grant")]
    tenant: Option<String>,
    /// Makes a key for the admin listener with this role, instead of one for a tenant.
    #[arg(long, group = "grant", value_parser = named::<OperatorRole>(&["admin", "read"]))]
    role: Option<OperatorRole>,
    /// The file to which the entry is added; it is created if it does not exist. Without it, the
    /// entry is printed.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Number of days after which the key expires.
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=36_500))]
    expires: Option<u32>,
    /// A text for people, for example who uses the key.
    #[arg(long)]
    note: Option<String>,
    /// Prints `{"key", "entry"}` as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// The file cannot be used or written.
pub(crate) fn run(args: KeysArgs) -> Result<String, Failure> {
    match args.command {
        KeysCommand::New(args) => new(args),
        KeysCommand::List { file, json } => list(&file, json),
        KeysCommand::Revoke { file, id } => revoke(&file, &id),
    }
}

fn new(args: NewArgs) -> Result<String, Failure> {
    let grant = match (args.tenant, args.role) {
        (Some(tenant), _) => Grant::Tenant(tenant.into()),
        (None, role) => Grant::Role(role.unwrap_or(OperatorRole::Read)),
    };
    let now = SystemTime::now();
    let expires = args.expires.map(|days| {
        let end = now + Duration::from_secs(u64::from(days) * 86_400);
        humantime::format_rfc3339_seconds(end).to_string()
    });
    let (key, entry) = generate(&grant, expires, args.note, now)?;
    if let Some(path) = &args.file {
        let mut file = match path.exists() {
            true => load(path)?,
            false => KeysFile::default(),
        };
        file.keys.push(entry.clone());
        write(path, &file)?;
    }
    if args.json {
        return Ok(json!({ "key": key, "entry": entry }).to_string());
    }
    Ok(match &args.file {
        Some(path) => format!(
            "key: {key}\nThis key is shown once. {} has its hash, as {}.",
            path.display(),
            entry.id
        ),
        None => format!(
            "key: {key}\nThis key is shown once. Add its entry to the list `keys:` of your file of \
             keys:\n{}",
            line(&entry)
        ),
    })
}

fn list(path: &Path, as_json: bool) -> Result<String, Failure> {
    let file = load(path)?;
    if as_json {
        let keys: Vec<Value> = file.keys.iter().map(without_hash).collect();
        return Ok(json!({ "keys": keys }).to_string());
    }
    let now = SystemTime::now();
    let mut table = format!("{:<12} {:<24} {:<22} note\n", "id", "for", "expires");
    for key in &file.keys {
        let of = match (&key.tenant, key.role) {
            (Some(tenant), _) => format!("tenant {tenant}"),
            (None, role) => format!("role {}", role.map_or("", OperatorRole::name)),
        };
        let is_over = key.expires_at().is_some_and(|expires| expires <= now);
        let expires = match (&key.expires, is_over) {
            (None, _) => "never".to_owned(),
            (Some(_), true) => "expired".to_owned(),
            (Some(expires), false) => expires.clone(),
        };
        let note = key.note.as_deref().unwrap_or_default();
        table += format!("{:<12} {of:<24} {expires:<22} {note}", key.id).trim_end();
        table.push('\n');
    }
    Ok(table.trim_end().to_owned())
}

fn revoke(path: &Path, id: &str) -> Result<String, Failure> {
    let mut file = load(path)?;
    let before = file.keys.len();
    file.keys.retain(|key| key.id != id);
    if file.keys.len() == before {
        return Err(Failure::new(
            exit::DATA_ERROR,
            format!("{}: no key has the id {id}", path.display()),
        ));
    }
    write(path, &file)?;
    Ok(format!("{id} is revoked; running routers refuse it within about a second"))
}

fn load(path: &Path) -> Result<KeysFile, Failure> {
    keys::load(path).map_err(|problems| {
        let code = if problems.is_unreadable() { exit::NO_INPUT } else { exit::DATA_ERROR };
        Failure::new(code, problems.to_string())
    })
}

/// Replaces the file as a whole, so that a router never reads a part of it.
fn write(path: &Path, file: &KeysFile) -> Result<(), Failure> {
    let entries: String = file.keys.iter().map(line).collect();
    let text =
        if entries.is_empty() { "keys: []\n".to_owned() } else { format!("keys:\n{entries}") };
    // The router that reads the file may run as another user.
    replace_whole(path, &text).map_err(|error| Failure::unwritten(&error))
}

/// An entry as one line of a YAML list. JSON is a part of YAML.
fn line(entry: &KeyEntry) -> String {
    format!("- {}\n", serde_json::to_value(entry).unwrap_or_default())
}

fn without_hash(entry: &KeyEntry) -> Value {
    let mut entry = serde_json::to_value(entry).unwrap_or_default();
    if let Some(entry) = entry.as_object_mut() {
        entry.remove("sha256");
    }
    entry
}
