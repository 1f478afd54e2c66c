//! Replaying a committed corpus as an ordinary test.

use std::path::Path;

/// Hands each file of a target's corpus to its check.
pub(crate) fn replay(target: &str, check: impl Fn(&[u8]) + std::panic::RefUnwindSafe) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let broken = |file: &&std::path::PathBuf| {
        let input = std::fs::read(file).unwrap();
        std::panic::catch_unwind(|| check(&input)).is_err()
    };
    let broken: Vec<_> = files.iter().filter(broken).collect();
    assert!(broken.is_empty(), "these inputs break a promise: {broken:#?}");
}
