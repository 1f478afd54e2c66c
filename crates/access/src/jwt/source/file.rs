//! A file with the keys of an issuer, which is read when it has changed.

use std::io;
use std::path::{Path, PathBuf};

use splitrail_config::jwks::read_file;
use tokio::task::spawn_blocking;

use super::outcome::IssuerKeys;
use crate::file_state::{FileState, file_state};

/// What was found in place of a file that had changed.
struct Change {
    /// The state before reading, so that a write meanwhile is noticed at the next look.
    state: Option<FileState>,
    text: io::Result<Vec<u8>>,
}

/// A file of keys that is read again when it has changed.
#[derive(Clone)]
pub(super) struct KeyFile {
    path: PathBuf,
    /// The state in which the file was last read with success. Without it, the next look reads the
    /// file in any case.
    known: Option<FileState>,
}

impl KeyFile {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), known: None }
    }

    /// Reads the file, if it has changed. Blocks the thread.
    pub(super) fn read_now(&mut self, keys: &IssuerKeys) {
        let change = change(&self.path, self.known);
        self.take(change, keys);
    }

    /// Reads the file, if it has changed.
    pub(super) async fn read(&mut self, keys: &IssuerKeys) {
        let (path, known) = (self.path.clone(), self.known);
        // The only error is that the runtime ends.
        if let Ok(change) = spawn_blocking(move || change(&path, known)).await {
            self.take(change, keys);
        }
    }

    fn take(&mut self, change: Option<Change>, keys: &IssuerKeys) {
        match change {
            None => keys.confirm(),
            Some(Change { state, text }) => {
                let is_usable = keys.accept(text);
                self.known = state.filter(|_| is_usable);
            }
        }
    }
}

fn change(path: &Path, known: Option<FileState>) -> Option<Change> {
    let state = file_state(path);
    (state.is_none() || state != known).then(|| Change { state, text: read_file(path) })
}
