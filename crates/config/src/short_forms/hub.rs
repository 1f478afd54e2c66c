//! Models in the local cache of the Hugging Face hub. Nothing is downloaded.
//!
//! The layout is that of `huggingface_hub`: `models--ORG--NAME/refs/main` holds the name of a folder
//! in `models--ORG--NAME/snapshots`.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Maximum length of the name of a revision; a commit has 40 characters.
const REVISION_MAX: u64 = 128;

/// The local cache, which may not exist.
#[derive(Clone, Debug)]
pub(crate) struct Hub {
    /// The folder of the cache; `None` if the environment names none.
    folder: Option<PathBuf>,
}

/// What the cache has of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CachedModel {
    /// The folder with the model's tokenizer.
    Tokenizer(PathBuf),
    /// The folder of the model, in which there is no `tokenizer.json`.
    NoTokenizer(PathBuf),
    /// Nothing.
    Nothing,
}

impl Hub {
    /// The cache that the environment of this process names.
    pub(crate) fn of_process() -> Self {
        Self::of(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// The cache that environment variables name, in the order of `huggingface_hub`.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let home = || {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
            cache.map(|cache| cache.join("huggingface"))
        };
        let folder = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(path("HF_HOME").or_else(home)?.join("hub")));
        Self { folder }
    }

    /// The folder of the cache, for messages.
    pub(crate) fn shown(&self) -> String {
        let folder = self.folder.as_ref();
        folder.map_or_else(|| "no folder".to_owned(), |folder| folder.display().to_string())
    }

    /// Looks up a model by its id on the hub, `ORG/NAME`.
    pub(crate) fn find(&self, id: &str) -> CachedModel {
        let Some(folder) = self.snapshot(id) else { return CachedModel::Nothing };
        match folder.join("tokenizer.json").is_file() {
            true => CachedModel::Tokenizer(folder),
            false => CachedModel::NoTokenizer(folder),
        }
    }

    /// The folder of a model's main revision.
    fn snapshot(&self, id: &str) -> Option<PathBuf> {
        if !is_id(id) {
            return None;
        }
        let model = self.folder.as_ref()?.join(format!("models--{}", id.replace('/', "--")));
        let revision = revision(&model.join("refs").join("main"))?;
        Some(model.join("snapshots").join(revision)).filter(|folder| folder.is_dir())
    }
}

/// Whether a text can be the id of a model: a name, or an organisation and a name.
pub(super) fn is_id(text: &str) -> bool {
    let is_name = |name: &str| {
        !name.is_empty()
            && name.len() <= 96
            && !name.starts_with('.')
            && !name.contains("..")
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    text.split('/').count() <= 2 && text.split('/').all(is_name)
}

/// The name of the folder that a reference names.
fn revision(reference: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(reference).ok()?.take(REVISION_MAX).read_to_string(&mut text).ok()?;
    let name = text.trim();
    let is_commit = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
    is_commit.then(|| name.to_owned())
}
