//! The cache of a model in the layout of `huggingface_hub`: contents in `blobs`, each under its
//! entity tag; links to them in `snapshots/COMMIT`; and the commit of a revision in `refs`. Every
//! file appears whole, and the revision names the commit last, so that readers and other processes
//! that write the same never see a part.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use super::download_error::DownloadError;
use super::hub::REVISION;

/// The folder of one model.
pub(super) struct Store(PathBuf);

impl Store {
    /// The folder of a model below that of the cache; it is created if it is missing.
    pub(super) fn open(cache: &Path, id: &str) -> Result<Self, DownloadError> {
        let store = Self(cache.join(format!("models--{}", id.replace('/', "--"))));
        for part in ["blobs", "refs", "snapshots"] {
            let folder = store.0.join(part);
            made(&folder, fs::create_dir_all(&folder))?;
        }
        Ok(store)
    }

    pub(super) fn folder(&self) -> &Path {
        &self.0
    }

    pub(super) fn has_blob(&self, name: &str) -> bool {
        self.blob(name).is_file()
    }

    /// Writes a content under its name.
    pub(super) fn write_blob(&self, name: &str, content: &[u8]) -> Result<(), DownloadError> {
        self.write(&self.blob(name), content)
    }

    /// Makes a file of a commit a link to a content, instead of what was there.
    pub(super) fn link(&self, commit: &str, file: &str, blob: &str) -> Result<(), DownloadError> {
        let place = self.0.join("snapshots").join(commit).join(file);
        let up = "../".repeat(2 + file.matches('/').count());
        let target = format!("{up}blobs/{blob}");
        made(&place, linked(&place, &target))
    }

    /// Lets the revision name a commit.
    pub(super) fn publish(&self, commit: &str) -> Result<(), DownloadError> {
        self.write(&self.0.join("refs").join(REVISION), commit.as_bytes())
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.0.join("blobs").join(name)
    }

    fn write(&self, place: &Path, content: &[u8]) -> Result<(), DownloadError> {
        let write = || -> io::Result<()> {
            let mut file = temporary(place)?;
            file.write_all(content)?;
            file.as_file().sync_all()?;
            file.persist(place)?;
            Ok(())
        };
        made(place, write())
    }
}

/// A file beside `place` that is removed unless it is kept. What others may read follows from the
/// umask, as for other files.
fn temporary(place: &Path) -> io::Result<NamedTempFile> {
    let folder = place.parent().unwrap_or(place);
    let mut builder = Builder::new();
    builder.prefix(".splitrail-").suffix(".incomplete");
    builder.permissions(Permissions::from_mode(0o666)).tempfile_in(folder)
}

fn linked(place: &Path, target: &str) -> io::Result<()> {
    let folder = place.parent().unwrap_or(place);
    fs::create_dir_all(folder)?;
    let link =
        Builder::new().prefix(".splitrail-").make_in(folder, |path| symlink(target, path))?;
    link.persist(place)?;
    Ok(())
}

fn made(place: &Path, result: io::Result<()>) -> Result<(), DownloadError> {
    result.map_err(|error| DownloadError::unwritten(place, &error))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const COMMIT: &str = "9c925d64d72725edaf899c6cb9c377fd0709d9c5";

    #[test]
    fn a_snapshot_links_to_contents_also_from_folders_and_again() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::open(cache.path(), "org/model").ok().unwrap();
        for name in ["config.json", "additional_chat_templates/tool_use.jinja"] {
            for content in ["one", "two"] {
                assert!(store.write_blob(content, content.as_bytes()).is_ok());
                assert!(store.link(COMMIT, name, content).is_ok());
                let place = store.folder().join("snapshots").join(COMMIT).join(name);
                assert_eq!(fs::read_to_string(&place).unwrap(), content, "{name}");
                assert!(fs::read_link(&place).unwrap().is_relative());
            }
        }
        assert!(store.publish(COMMIT).is_ok());
        assert_eq!(fs::read_to_string(store.folder().join("refs/main")).unwrap(), COMMIT);
        let left = |folder: &str| fs::read_dir(store.folder().join(folder)).unwrap().count();
        assert_eq!((left("blobs"), left("refs"), left("snapshots")), (2, 1, 1));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let file = NamedTempFile::new().unwrap();
        let error = Store::open(file.path(), "org/model").err().unwrap();
        assert!(error.why.contains("models--org--model"), "{}", error.why);
    }
}
