//! Opens ledger files with their rotated files, while routers may rotate them.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How often a ledger's files are opened again because a rotation has renamed them meanwhile. A
/// rotation takes milliseconds.
const ATTEMPTS_MAX: u32 = 1000;

/// Device and number of a file: the same under all of its names.
pub(super) type FileId = (u64, u64);

/// A file under the name by which it was found.
type OpenedFile = (PathBuf, FileId, File);

fn id(metadata: &Metadata) -> FileId {
    (metadata.dev(), metadata.ino())
}

/// Opens a ledger file and its rotated files, without those that are `known`, whatever their names.
/// A rotation that renames open files changes nothing for the reader.
///
/// # Errors
/// A file cannot be opened; the message names the ledger.
pub(super) fn open(
    ledger: &Path,
    known: &mut HashSet<FileId>,
) -> Result<Vec<(PathBuf, File)>, String> {
    let opened = open_all(ledger).map_err(|error| format!("{}: {error}", ledger.display()))?;
    let unknown = opened.into_iter().filter(|(_, id, _)| known.insert(*id));
    Ok(unknown.map(|(path, _, file)| (path, file)).collect())
}

/// Opens the files of one ledger at a moment at which no rotation is under way.
fn open_all(ledger: &Path) -> io::Result<Vec<OpenedFile>> {
    let mut last = io::Error::other("its files are renamed all the time: rotate them less often");
    for _ in 0..ATTEMPTS_MAX {
        match open_listed(ledger) {
            Ok(Some(files)) => return Ok(files),
            Ok(None) => {}
            // In a rotation, the ledger has no file for a moment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => last = error,
            Err(error) => return Err(error),
        }
        std::thread::yield_now();
    }
    Err(last)
}

/// Opens the files of a ledger; `None` if one was renamed meanwhile.
fn open_listed(ledger: &Path) -> io::Result<Option<Vec<OpenedFile>>> {
    let listed = list(ledger)?;
    let mut files = Vec::with_capacity(listed.len());
    for (path, listed_id) in &listed {
        let file = File::open(path)?;
        if id(&file.metadata()?) != *listed_id {
            return Ok(None);
        }
        files.push((path.clone(), *listed_id, file));
    }
    // No file was renamed between the two lists, so that none is missing or listed twice.
    Ok((list(ledger)? == listed).then_some(files))
}

/// The largest number of a rotated file: that of `rotate.files_max`.
const NUMBER_MAX: u32 = 10_000;

/// The ledger file, which must exist, and its rotated files: `PATH.1`, `PATH.2`, and so on. Numbers may
/// be missing. Other files, for example copies that are named by a date, are not the router's.
fn list(ledger: &Path) -> io::Result<BTreeMap<PathBuf, FileId>> {
    let mut files = BTreeMap::from([(ledger.to_owned(), id(&fs::metadata(ledger)?))]);
    let folder = ledger.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(name) = ledger.file_name().and_then(|name| name.to_str()) else { return Ok(files) };
    for entry in fs::read_dir(folder.unwrap_or(Path::new(".")))? {
        let entry = entry?;
        let entry_name = entry.file_name();
        let number =
            entry_name.to_str().and_then(|entry| entry.strip_prefix(name)?.strip_prefix('.'));
        let is_number = |text: &str| {
            let number =
                text.parse::<u32>().ok().filter(|number| (1..=NUMBER_MAX).contains(number));
            number.is_some_and(|number| number.to_string() == text)
        };
        if !number.is_some_and(is_number) {
            continue;
        }
        let path = ledger.with_file_name(&entry_name);
        match fs::metadata(&path) {
            Ok(metadata) => files.insert(path, id(&metadata)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
    }
    Ok(files)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    fn texts(ledgers: &[PathBuf]) -> Vec<String> {
        let mut known = HashSet::new();
        let mut texts: Vec<String> = ledgers
            .iter()
            .flat_map(|ledger| open(ledger, &mut known).unwrap())
            .map(|(_, mut file)| {
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                text
            })
            .collect();
        texts.sort();
        texts
    }

    #[test]
    fn each_file_is_read_once_by_whatever_names_and_numbers_may_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, text) in [
            ("l", "a"),
            ("l.1", "b"),
            ("l.4", "c"),
            ("l.10", "d"),
            ("l.gz", "no"),
            ("lx.2", "no"),
            ("l.20261127", "no"),
            ("l.07", "no"),
            ("l.0", "no"),
            ("l.+2", "no"),
        ] {
            fs::write(path(name), text).unwrap();
        }
        std::os::unix::fs::symlink(path("l"), path("link")).unwrap();
        let named = [path("l"), path("./l"), path("link"), path("l.1")];
        assert_eq!(texts(&named), ["a", "b", "c", "d"]);
        assert!(open(&path("none"), &mut HashSet::new()).is_err());
    }

    #[test]
    fn a_rotation_meanwhile_hides_no_file_and_repeats_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = |number: u32| match number {
            0 => folder.path().join("l"),
            _ => folder.path().join(format!("l.{number}")),
        };
        for number in 0..4 {
            fs::write(path(number), format!("{number}")).unwrap();
        }
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // As the router does it, with pauses in which all files have their names.
                for files in 4..60 {
                    for number in (0..files).rev() {
                        fs::rename(path(number), path(number + 1)).unwrap();
                    }
                    fs::write(path(0), format!("{files}")).unwrap();
                }
                is_done.store(true, Relaxed);
            });
            while !is_done.load(Relaxed) {
                // The other thread may pause while the newest file has no name.
                let Ok(files) = open(&path(0), &mut HashSet::new()) else { continue };
                let ids: HashSet<_> =
                    files.iter().map(|(_, file)| id(&file.metadata().unwrap())).collect();
                assert_eq!(ids.len(), files.len());
                let mut numbers: Vec<u32> = Vec::new();
                for (_, mut file) in files {
                    let mut text = String::new();
                    file.read_to_string(&mut text).unwrap();
                    // The newest one may not be written yet.
                    numbers.extend(text.parse::<u32>().ok());
                }
                numbers.sort_unstable();
                let last = numbers.last().copied().unwrap();
                assert_eq!(numbers, (0..=last).collect::<Vec<_>>());
            }
        });
    }
}
