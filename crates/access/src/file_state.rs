//! Whether a file has changed.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The device, inode, size, and times of modification and change of a file. Any way of replacing a
/// file, or of letting others read it, changes one of these numbers, unless the content is replaced
/// by content of the same length within the resolution of the file system's clock.
pub(crate) type FileState = (u64, u64, u64, [i64; 4]);

/// The state of a file; of the target, if the path is a link. `None` if there is no file.
pub(crate) fn file_state(path: &Path) -> Option<FileState> {
    let file = std::fs::metadata(path).ok()?;
    // Another owner or other permissions change the time of the last change only.
    let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
    Some((file.dev(), file.ino(), file.size(), times))
}
