//! Operating system functions that both programs need.

use std::fs::{File, OpenOptions, Permissions};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// Permissions of the files that a process writes: they contain the names of workers, models and
/// clients' requests.
const PRIVATE_MODE: u32 = 0o600;

/// Permissions of a file that the group of its folder may read.
const GROUP_MODE: u32 = 0o640;
/// The permission of a file's group to read it.
const GROUP_READS: u32 = 0o040;

/// Writes a file under a temporary name and renames it, so that no reader sees a part of it. Only
/// the process's user can read the file.
///
/// The temporary name is new: no existing file is overwritten, and no link is followed.
///
/// # Errors
/// The file cannot be written; the message names it.
pub fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    write_and_rename(path, text, |_| Ok(()))
}

/// Like [`write_whole`], for a file that a process of another user reads. A file that exists keeps
/// its owner, group and permissions; if it can be read by its group, this process may become its
/// owner. A link stays, and what it leads to is replaced. A new file can be read by the group of its
/// folder if this process may give a file to that group, and otherwise only by the process's user.
///
/// # Errors
/// The file cannot be written, or cannot be given to those who could read it; it then stays as it
/// was.
pub fn replace_whole(path: &Path, text: &str) -> io::Result<()> {
    let resolved = path.canonicalize();
    let path = resolved.as_deref().unwrap_or(path);
    write_and_rename(path, text, |file| match path.metadata() {
        Ok(old) => {
            fchown(file, Some(old.uid()), Some(old.gid())).or_else(|error| {
                match old.mode() & GROUP_READS != 0 {
                    true => fchown(file, None, Some(old.gid())),
                    false => Err(error),
                }
            })?;
            file.set_permissions(old.permissions())
        }
        Err(_) => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let group = folder.unwrap_or(Path::new(".")).metadata()?.gid();
            let is_given =
                group == file.metadata()?.gid() || fchown(file, None, Some(group)).is_ok();
            let mode = if is_given { GROUP_MODE } else { PRIVATE_MODE };
            file.set_permissions(Permissions::from_mode(mode))
        }
    })
}

fn write_and_rename(
    path: &Path,
    text: &str,
    give: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    let unpredictable = RandomState::new().hash_one(std::process::id());
    beside.push(format!(".{unpredictable:016x}.partial"));
    let beside = PathBuf::from(beside);
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
    };
    let mut new = OpenOptions::new();
    let mut file =
        new.write(true).create_new(true).mode(PRIVATE_MODE).open(&beside).map_err(named)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| give(&file));
    written.and_then(|()| std::fs::rename(&beside, path)).map_err(|error| {
        // Removes the incomplete file, which may not exist.
        let _absent = std::fs::remove_file(&beside);
        named(error)
    })
}

/// Opens a file that is read again while the process runs.
///
/// # Errors
/// The file cannot be opened, or is not a regular file: to open or read a pipe or a device might never
/// end.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let at_once = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new().read(true).custom_flags(at_once).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Reads a file as [`open_regular`] opens it.
///
/// # Errors
/// The file cannot be opened or read, or has more than `bytes_max` bytes, which is
/// [`io::ErrorKind::FileTooLarge`].
pub fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is too large")),
        false => Ok(bytes),
    }
}

/// Opens or creates a file for reading and appending. A new file can be read by the process's user
/// only.
///
/// # Errors
/// The file cannot be opened, or is a symbolic link: whoever may write in its folder could lead the
/// process to another file. Links among the folders of the path are followed.
pub fn open_to_append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(PRIVATE_MODE);
    let no_link = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).map_err(io::Error::other)?;
    options.custom_flags(no_link).open(path).map_err(|error| {
        match error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            true => io::Error::new(error.kind(), "it is a link; name the file that it leads to"),
            false => error,
        }
    })
}

/// How many files this process may have open.
pub fn descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Raises the soft limit on open files to the hard limit: a stream needs two, one for its client
/// and one for its engine. Warns if the limit is low for `streams_max` streams, which the
/// configuration's `key` allows.
pub fn raise_descriptor_limit(streams_max: usize, key: &str) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit on open files cannot be raised");
    }
    let files = descriptor_limit();
    if files < 3 * streams_max as u64 {
        tracing::warn!(
            files,
            streams_max,
            "the limit on open files is low for {key}: 3 each are enough"
        );
    }
}
