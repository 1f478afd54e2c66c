//! The state of a tokenizer's files when they were read, to detect later changes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Maximum number of files of a folder that are examined; no model has as many.
const FILES_MAX: usize = 1024;

/// The size and modification time of one file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileStamp {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// The files around a `tokenizer.json` that may affect tokenisation, in order. Files whose metadata
/// cannot be read are left out: loading either fails on them or does not need them.
pub fn stamps(path: &Path) -> Vec<FileStamp> {
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folders = [folder.to_path_buf(), folder.join("additional_chat_templates")];
    let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let files = entries.take(FILES_MAX).filter_map(|entry| Some(entry.ok()?.path()));
    let mut stamps: Vec<_> = files.filter(|path| matters(path)).filter_map(stamp).collect();
    stamps.sort_unstable();
    stamps
}

/// The current state of one file; `None` if it is not a readable file.
pub fn stamp(path: PathBuf) -> Option<FileStamp> {
    // Follows links, because the target is what is read.
    let found = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
    Some(FileStamp { path, bytes: found.len(), modified: found.modified().ok() })
}

fn matters(path: &Path) -> bool {
    let named = |start: &str| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(start))
    };
    let ends = path.extension().is_some_and(|end| end == "json" || end == "jinja");
    ends || named("tokenizer")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_template_is_noticed_and_weights_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text);
        write("tokenizer.json", "{}").unwrap();
        let before = stamps(folder.path());
        assert_eq!(before, stamps(&folder.path().join("tokenizer.json")));
        write("model.safetensors", "weights").unwrap();
        assert_eq!(before, stamps(folder.path()));
        write("chat_template.jinja", "{{ 1 }}").unwrap();
        let with_template = stamps(folder.path());
        assert_ne!(before, with_template);
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        write("additional_chat_templates/tool_use.jinja", "{{ 2 }}").unwrap();
        assert_ne!(with_template, stamps(folder.path()));
    }
}
