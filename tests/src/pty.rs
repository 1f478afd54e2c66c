//! A program on a terminal: a pseudo terminal whose other end the test holds.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::cluster::eventually;

/// A program that runs on a terminal of its own. Dropping it kills it.
pub struct OnTerminal {
    child: Child,
    /// The program's end of the terminal, which stays open so that its state can be seen.
    own: Option<OwnedFd>,
    keyboard: File,
    written: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
    size: (u16, u16),
}

impl OnTerminal {
    /// Starts a program on a terminal with so many columns and rows.
    pub fn start(program: &Path, args: &[&str], env: &[(&str, &str)], size: (u16, u16)) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a pseudo terminal");
        grantpt(&master).expect("a right to it");
        unlockpt(&master).expect("its other end");
        let own = ioctl_tiocgptpeer(&master, flags).expect("its other end");
        tcsetwinsize(&own, winsize(size)).expect("a size");
        let stdio = || Stdio::from(own.try_clone().expect("a descriptor"));
        // The terminal becomes the program's controlling one, which signals go to.
        let child = Command::new("setsid")
            .args(["--ctty", "--wait"])
            .arg(program)
            .args(args)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .envs(env.iter().copied())
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .expect("a process");
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let written = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&written);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 16 << 10];
            // It ends when nobody has the other end any more.
            while let Ok(count @ 1..) = screen.read(&mut buffer) {
                let mut written = shared.lock().unwrap_or_else(PoisonError::into_inner);
                written.extend_from_slice(&buffer[..count]);
            }
        });
        Self { child, own: Some(own), keyboard, written, reader: Some(reader), size }
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("a keyboard");
    }

    /// Changes the size of the terminal.
    pub fn resize(&mut self, size: (u16, u16)) {
        self.size = size;
        tcsetwinsize(&self.keyboard, winsize(size)).expect("a size");
    }

    /// Everything that was written.
    pub fn output(&self) -> String {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&written).into_owned()
    }

    /// The rows of the screen.
    pub fn rows(&self) -> Vec<String> {
        rows(&self.output(), self.size)
    }

    /// Waits until the screen shows a text in one of its rows.
    pub async fn until_shown(&self, text: &str) {
        let what = format!("the terminal shows {text:?}");
        eventually(&what, async || self.rows().iter().any(|row| row.contains(text))).await;
    }

    /// Waits until the screen does not show a text.
    pub async fn until_hidden(&self, text: &str) {
        let what = format!("the terminal does not show {text:?}");
        eventually(&what, async || !self.rows().iter().any(|row| row.contains(text))).await;
    }

    /// Whether the terminal echoes keys and reads lines, as a shell expects.
    pub fn is_restored(&self) -> bool {
        let own = self.own.as_ref().expect("a terminal");
        let modes = tcgetattr(own).expect("modes").local_modes;
        let output = self.output();
        let last = |text: &str| output.rfind(text);
        let is_first_screen = last("\x1b[?1049l") >= last("\x1b[?1049h");
        let has_cursor = last("\x1b[?25h") >= last("\x1b[?25l");
        modes.contains(LocalModes::ECHO | LocalModes::ICANON) && is_first_screen && has_cursor
    }

    /// Waits until the terminal [is restored](Self::is_restored): its last bytes may be read after
    /// the program has ended.
    pub async fn until_restored(&self) {
        eventually("the terminal is restored", async || self.is_restored()).await;
    }

    /// The process that runs the program's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the program.
    pub async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the program on the terminal ends", async || {
            status = self.child.try_wait().expect("a status");
            status.is_some()
        })
        .await;
        status.expect("a status")
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut stderr = std::io::stderr();
            let text = format!("--- the screen ---\n{}\n", self.rows().join("\n"));
            let _unseen = stderr.write_all(text.as_bytes());
        }
        // It may be gone already.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
        self.own = None;
        // A program that outlived its parent would keep the reader.
        if let Some(reader) = self.reader.take().filter(JoinHandle::is_finished) {
            let _ended = reader.join();
        }
    }
}

fn winsize((columns, rows): (u16, u16)) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

/// The rows of a screen after `output`: characters, line ends, and the sequences that move the
/// cursor or clear the screen (ECMA-48). Others change nothing that is looked at. A sequence that is
/// not complete yet is left out.
fn rows(output: &str, (columns, height): (u16, u16)) -> Vec<String> {
    let (columns, height) = (usize::from(columns), usize::from(height));
    let blank = vec![vec![' '; columns]; height];
    let mut screen = blank.clone();
    let (mut x, mut y) = (0, 0);
    let mut chars = output.chars();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                if chars.next() != Some('[') {
                    continue;
                }
                let mut arguments = String::new();
                let end = loop {
                    match chars.next() {
                        Some(c @ '@'..='~') => break c,
                        Some(c) => arguments.push(c),
                        None => break '\0',
                    }
                };
                let number = |at: usize| {
                    arguments.split(';').nth(at).and_then(|text| text.parse::<usize>().ok())
                };
                match end {
                    'H' => {
                        y = number(0).unwrap_or(1).saturating_sub(1);
                        x = number(1).unwrap_or(1).saturating_sub(1);
                    }
                    'J' => screen.clone_from(&blank),
                    'K' if y < height => screen[y][x.min(columns)..].fill(' '),
                    'C' => x += number(0).unwrap_or(1),
                    // Another screen.
                    'h' | 'l' if arguments == "?1049" => screen.clone_from(&blank),
                    _ => {}
                }
            }
            '\r' => x = 0,
            '\n' => y += 1,
            c if c.is_control() => {}
            c => {
                if y < height && x < columns {
                    screen[y][x] = c;
                }
                x += 1;
            }
        }
    }
    screen.into_iter().map(|row| String::from_iter(row).trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_what_was_written_where() {
        let output = "\x1b[?1049h\x1b[2J\x1b[2;3H\x1b[1mab\x1b[0m\x1b[1;1Hc\r\nd\x1b[2";
        assert_eq!(rows(output, (4, 3)), ["c", "d ab", ""]);
        assert_eq!(rows("abc\x1b[1;2H\x1b[K", (4, 1)), ["a"]);
    }
}
