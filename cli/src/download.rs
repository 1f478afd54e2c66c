//! `--download`: fetches tokenizers that a configuration names by their ids from the Hugging Face hub
//! into the cache of this host, before the configuration is checked. Without the flag nothing is
//! fetched, and what cannot be fetched is a mistake of the configuration.

use std::time::Duration;

use splitrail_config::{ConfigText, LoadedConfig, Parts, Problems, hub_folder};
use splitrail_settings::command::{Failure, exit};

mod download_error;
mod environment;
mod fetch;
mod files;
mod hub;
mod location;
mod store;

use download_error::DownloadError;
use environment::Environment;
use hub::Hub;
use store::Store;

/// Maximum time for all files of one model.
const MODEL_TIME_MAX: Duration = Duration::from_secs(600);

/// Why a configuration that `--download` was asked for cannot be used.
pub(crate) struct LoadFailure {
    pub(crate) problems: Problems,
    /// The exit code, if it is not that of the problems.
    code: Option<u8>,
}

impl From<Problems> for LoadFailure {
    fn from(problems: Problems) -> Self {
        Self { problems, code: None }
    }
}

impl LoadFailure {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        let of_problems = if self.problems.is_unreadable() { exit::NO_INPUT } else { exit::CONFIG };
        self.code.unwrap_or(of_problems)
    }

    /// The failure of the command. With `logs`, each problem becomes a log record.
    pub(crate) fn failure(&self, logs: bool) -> Failure {
        Failure { code: self.code(), ..Failure::of_problems(&self.problems, logs) }
    }
}

/// Checks a configuration; with `downloads`, its tokenizers are fetched before that.
///
/// # Errors
/// All mistakes of the configuration; or the first tokenizer that cannot be fetched, at its place.
pub(crate) async fn load(
    text: &ConfigText,
    parts: Parts,
    downloads: bool,
) -> Result<LoadedConfig, LoadFailure> {
    let missing = if downloads { text.missing_tokenizers() } else { Vec::new() };
    let mut fetched: Vec<&str> = Vec::new();
    for tokenizer in &missing {
        if fetched.contains(&&*tokenizer.id) {
            continue;
        }
        let limited = tokio::time::timeout(MODEL_TIME_MAX, fetch(&tokenizer.id)).await;
        let outcome = limited.unwrap_or_else(|_| {
            let minutes = MODEL_TIME_MAX.as_secs() / 60;
            Err(DownloadError::unavailable(format!("it takes more than {minutes} minutes")))
        });
        if let Err(DownloadError { code, why, hint }) = outcome {
            let problems = text.not_fetched(tokenizer, &why, &hint);
            return Err(LoadFailure { problems, code: Some(code) });
        }
        fetched.push(&tokenizer.id);
    }
    Ok(text.load(parts)?)
}

/// Fetches the tokenizer of one model.
async fn fetch(id: &str) -> Result<(), DownloadError> {
    let folder = hub_folder().ok_or_else(|| {
        DownloadError::config("there is no cache", "set HF_HOME to a folder for it")
    })?;
    let hub = Hub::new(Environment::of_process()?)?;
    let listing = hub.listing(id).await?;
    let store = Store::open(&folder, id)?;
    let (mut count, mut bytes) = (0_usize, 0_usize);
    // `tokenizer.json` comes last, because a snapshot with it counts as complete.
    for file in files::wanted(&listing)? {
        let described = hub.open(id, &listing.commit, file).await?;
        let blob = described.blob.clone();
        if !store.has_blob(&blob) {
            let content = described.read().await?;
            bytes += content.len();
            store.write_blob(&blob, &content)?;
        }
        store.link(&listing.commit, file.name, &blob)?;
        count += 1;
    }
    store.publish(&listing.commit)?;
    tracing::info!(model = id, commit = listing.commit, files = count, bytes, folder = %store.folder().display(), "tokenizer downloaded");
    if files::may_be_mistral(&listing) {
        tracing::warn!(
            model = id,
            "the model has files in Mistral's own format, which engines prefer and the router \
             cannot read: if tokens differ, use `tokenizer: engine`"
        );
    }
    Ok(())
}
