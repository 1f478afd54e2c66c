//! What commands that take long share: a progress bar, and files of results.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use splitrail_settings::command::{Failure, exit, print_error};

/// Writes a file through a buffer.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), Failure> {
    let written = File::create(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.flush()
    });
    written.map_err(|error| Failure::new(exit::IO_ERROR, format!("{}: {error}", path.display())))
}

/// A progress bar on standard error, if that is a terminal and the work takes long.
pub(crate) struct ProgressBar {
    total: usize,
    started: Instant,
    drawn: Option<Instant>,
    visible: bool,
}

impl ProgressBar {
    /// Before this time the bar would only flicker.
    const PATIENCE: Duration = Duration::from_millis(500);
    const REDRAW: Duration = Duration::from_millis(100);
    const WIDTH: usize = 40;

    pub(crate) fn new(total: usize) -> Self {
        let visible = std::io::stderr().is_terminal();
        Self { total: total.max(1), started: Instant::now(), drawn: None, visible }
    }

    pub(crate) fn at(&mut self, done: usize) {
        let now = Instant::now();
        let recent = self.drawn.is_some_and(|drawn| now - drawn < Self::REDRAW);
        if !self.visible || recent || now - self.started < Self::PATIENCE {
            return;
        }
        self.drawn = Some(now);
        let full = done * Self::WIDTH / self.total;
        let (full, empty) = ("#".repeat(full), ".".repeat(Self::WIDTH - full));
        draw(&format!("\r[{full}{empty}] {:3} %", done * 100 / self.total));
    }

    pub(crate) fn clear(&self) {
        if self.drawn.is_some() {
            draw("\r\x1b[K");
        }
    }
}

fn draw(text: &str) {
    let mut err = std::io::stderr().lock();
    if let Err(error) = err.write_all(text.as_bytes()).and_then(|()| err.flush()) {
        print_error(&error.to_string());
    }
}
