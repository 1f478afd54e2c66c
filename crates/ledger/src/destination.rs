//! Where lines are written: a file that rotates, or a stream such as standard output.

use std::fs::File;
use std::io::{self, Write};

use super::file::LedgerFile;

/// Where lines are written.
#[derive(Debug)]
pub(crate) enum Destination {
    /// A file that rotates.
    File(LedgerFile),
    /// A stream, which may be a pipe that nobody reads: a write can take for ever.
    Stream(Stream),
}

/// A stream that is only written to.
#[derive(Debug)]
pub(crate) struct Stream {
    file: File,
    /// Whether the last write failed, perhaps in the middle of a line.
    has_failed: bool,
}

impl Destination {
    /// The stream behind a descriptor.
    pub(crate) fn stream(file: File) -> Self {
        Self::Stream(Stream { file, has_failed: false })
    }

    /// Appends complete lines.
    ///
    /// # Errors
    /// If the lines cannot be written. In this case none of them is in a file, but a part of them may
    /// be in a stream, which later lines do not continue.
    pub(crate) fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.append(lines),
            Self::Stream(Stream { file, has_failed }) => {
                let written = match *has_failed {
                    true => file.write_all(&[b"\n", lines].concat()),
                    false => file.write_all(lines),
                };
                *has_failed = written.is_err();
                written
            }
        }
    }

    /// The number of bytes that can be appended before a file is full.
    pub(crate) fn room_bytes(&self) -> u64 {
        match self {
            Self::File(file) => file.room_bytes(),
            Self::Stream(_) => u64::MAX,
        }
    }

    /// Waits until all data of a file are on the disk.
    ///
    /// # Errors
    /// If the data cannot be written to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync(),
            Self::Stream(_) => Ok(()),
        }
    }
}
