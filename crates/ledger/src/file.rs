//! A file of lines that is only appended to, and rotated when it is full.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use splitrail_settings::process::open_to_append;

use splitrail_config::Rotation;

/// The file to which lines are appended. Full files are in the same directory: `PATH.1` is the
/// newest of them.
#[derive(Debug)]
pub(crate) struct LedgerFile {
    path: PathBuf,
    /// The configuration's section, for logs.
    section: &'static str,
    rotate: Rotation,
    file: File,
    /// Bytes of complete lines in `file`.
    bytes: u64,
}

impl LedgerFile {
    /// Opens or creates a file. If the last line is incomplete, because a process was killed while
    /// it wrote, the line is ended so that the next line is not appended to it.
    ///
    /// # Errors
    /// If the file cannot be written or is a link, or another process writes to it.
    pub(crate) fn open(path: &Path, section: &'static str, rotate: Rotation) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("cannot write {section}.path {}: {error}", path.display()),
            )
        };
        let (mut file, mut bytes) = begin(path).map_err(named)?;
        if bytes > 0 && !ends_a_line(&mut file).map_err(named)? {
            file.write_all(b"\n").map_err(named)?;
            bytes += 1;
        }
        Ok(Self { path: path.to_owned(), section, rotate, file, bytes })
    }

    /// Appends complete lines. A full file is rotated first.
    ///
    /// # Errors
    /// If the lines cannot be written. In this case none of them is in the file.
    pub(crate) fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.bytes > 0 && self.bytes + lines.len() as u64 > self.rotate.max_bytes {
            self.make_room()?;
        }
        if let Err(error) = self.file.write_all(lines) {
            // Remove an incomplete line, since the next line would be appended to it. If this fails
            // as well (for a device, say), nothing more can be done.
            let _as_before = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += lines.len() as u64;
        Ok(())
    }

    /// The number of bytes that can be appended before the file is full.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.rotate.max_bytes.saturating_sub(self.bytes)
    }

    /// Waits until all data are on the disk.
    ///
    /// # Errors
    /// If the data cannot be written to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Moves the full file aside and begins a new one.
    fn make_room(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        let permissions = self.file.metadata()?.permissions();
        // A link that has taken the place of the file moves aside as well.
        if self.path.symlink_metadata().is_ok() {
            self.move_aside()?;
        }
        (self.file, self.bytes) = begin(&self.path)?;
        // The new file gets the permissions of the full file.
        self.file.set_permissions(permissions)
    }

    fn move_aside(&self) -> io::Result<()> {
        // Use the first free number, or the last number, whose file is overwritten.
        let keep = self.rotate.files_max;
        let free = (1..=keep).find(|number| !self.aside(*number).exists());
        let last = free.unwrap_or(keep);
        if free.is_none() {
            let gone = self.aside(last);
            let section = self.section;
            tracing::warn!(file = %gone.display(), "the oldest file makes room ({section}.rotate.files_max)");
        }
        for number in (1..last).rev() {
            std::fs::rename(self.aside(number), self.aside(number + 1))?;
        }
        std::fs::rename(&self.path, self.aside(1))
    }

    fn aside(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }
}

/// Opens a file for appending and locks it for this process.
fn begin(path: &Path) -> io::Result<(File, u64)> {
    let file = open_to_append(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = "another process writes it; give each router its own";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
        // Not every file system supports locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

fn ends_a_line(file: &mut File) -> io::Result<bool> {
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn full_files_move_aside_whole_and_the_oldest_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let mut file =
            LedgerFile::open(&path, "ledger", Rotation { max_bytes: 10, files_max: 2 }).unwrap();
        for line in ["one 1\n", "two 2\n", "three 3\n", "four 4\n"] {
            file.append(line.as_bytes()).unwrap();
        }
        assert_eq!(read(&path), "four 4\n");
        assert_eq!(read(&folder.path().join("ledger.jsonl.1")), "three 3\n");
        assert_eq!(read(&folder.path().join("ledger.jsonl.2")), "two 2\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
        // Lines that exceed the size of a file are still written together into one file.
        file.append(b"a line of more than ten bytes\n").unwrap();
        assert_eq!(read(&path), "a line of more than ten bytes\n");
    }

    #[test]
    fn a_hole_among_the_old_files_is_filled_before_any_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        std::fs::write(folder.path().join("l.1"), "new\n").unwrap();
        std::fs::write(folder.path().join("l.3"), "old\n").unwrap();
        let mut file =
            LedgerFile::open(&path, "ledger", Rotation { max_bytes: 2, files_max: 3 }).unwrap();
        file.append(b"a\n").unwrap();
        file.append(b"b\n").unwrap();
        let held = ["l", "l.1", "l.2", "l.3"].map(|name| read(&folder.path().join(name)));
        assert_eq!(held, ["b\n", "a\n", "new\n", "old\n"]);
    }

    #[test]
    fn no_link_in_the_place_of_the_file_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, precious] = ["l", "precious"].map(|name| folder.path().join(name));
        let link = || std::os::unix::fs::symlink(&precious, &path).unwrap();
        std::fs::write(&precious, "precious").unwrap();
        link();
        let rotate = Rotation { max_bytes: 2, files_max: 3 };
        let refused = LedgerFile::open(&path, "ledger", rotate).unwrap_err();
        assert!(refused.to_string().contains("ledger.path"), "{refused}");
        assert!(refused.to_string().contains("it is a link"), "{refused}");
        std::fs::remove_file(&path).unwrap();
        let mut file = LedgerFile::open(&path, "ledger", rotate).unwrap();
        file.append(b"a\n").unwrap();
        // A link that takes its place later moves aside like the file.
        std::fs::remove_file(&path).unwrap();
        link();
        file.append(b"b\n").unwrap();
        assert_eq!([read(&path), read(&precious)], ["b\n", "precious"]);
    }

    #[test]
    fn half_a_line_of_a_killed_process_spoils_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        std::fs::write(&path, "{\"whole\":1}\n{\"ha").unwrap();
        let rotate = Rotation::default();
        let mut file = LedgerFile::open(&path, "ledger", rotate).unwrap();
        file.append(b"{\"next\":2}\n").unwrap();
        let text = read(&path);
        assert_eq!(text.lines().collect::<Vec<_>>(), ["{\"whole\":1}", "{\"ha", "{\"next\":2}"]);
        let taken = LedgerFile::open(&path, "ledger", rotate).unwrap_err();
        assert!(taken.to_string().contains("another process"), "{taken}");
    }
}
