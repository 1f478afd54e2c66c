//! Why a model's tokenizer cannot be loaded.

use std::path::PathBuf;

/// A model's tokenizer files could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message} ({hint})", path.display())]
pub struct LoadError {
    /// The file with the problem.
    pub path: PathBuf,
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: &'static str,
}
