//! Why a tokenizer cannot be fetched.

use std::io;
use std::path::Path;

use splitrail_settings::command::exit;

/// Why a tokenizer cannot be fetched.
pub(super) struct DownloadError {
    /// The exit code.
    pub(super) code: u8,
    /// What is wrong, behind a colon.
    pub(super) why: String,
    /// What to do about it.
    pub(super) hint: String,
}

impl DownloadError {
    /// The hub cannot be reached, or does not work.
    pub(super) fn unavailable(why: impl Into<String>) -> Self {
        let hint = "HF_ENDPOINT names another hub; without one, put the model's files (no weights) \
                    into a folder and name it by `tokenizer:`, or use `tokenizer: engine`";
        Self { code: exit::UNAVAILABLE, why: why.into(), hint: hint.to_owned() }
    }

    /// What the configuration or the environment says cannot be done.
    pub(super) fn config(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: exit::CONFIG, why: why.into(), hint: hint.into() }
    }

    /// A file of the cache cannot be written.
    pub(super) fn unwritten(place: &Path, error: &io::Error) -> Self {
        let why = format!("{} cannot be written: {error}", place.display());
        let hint = "HF_HOME or HF_HUB_CACHE names a folder that this user may write";
        Self { code: exit::IO_ERROR, why, hint: hint.to_owned() }
    }
}
