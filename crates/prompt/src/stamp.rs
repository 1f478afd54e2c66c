//! The state of a tokenizer's files when they were read, to detect later changes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Files of a folder that are looked at; no model has as many.
const FILES_MAX: usize = 1024;

/// One file as it was.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileStamp {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// The files around a `tokenizer.json` that may say how text becomes tokens, in order. What
/// cannot be looked at is left out: to load it fails, or does without.
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

/// One file as it is now; `None` if it cannot be looked at.
pub fn stamp(path: PathBuf) -> Option<FileStamp> {
    // Links are followed: where they lead to is what is read.
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
    fn a_template_that_changes_is_noticed_and_weights_are_not_looked_at() {
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
