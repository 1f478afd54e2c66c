//! The terminal: its screen and its keys.

use std::io::{self, Write, stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crossterm::cursor::{Hide, Show};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::execute;
use crossterm::terminal::{self, EnterAlternateScreen, LeaveAlternateScreen};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::frame::{Paint, draw};
use super::grid::Grid;
use super::options::{Action, Options};
use super::view::View;

/// Number of keys that may wait to be read.
const KEYS_MAX: usize = 64;

/// Time between two looks at whether keys are still wanted.
const LOOK: Duration = Duration::from_millis(100);

/// Lines that a page key scrolls by.
const PAGE_LINES: isize = 10;

/// The width of the terminal in columns, if there is one.
pub(super) fn width() -> Option<u16> {
    terminal::size().ok().map(|(width, _)| width)
}

/// The terminal in raw mode, showing its second screen. Dropping it, also in a panic, restores the
/// first screen with the cursor.
pub(super) struct Screen {
    /// What the terminal shows, if that is known.
    shown: Option<Grid>,
}

impl Screen {
    /// Opens the second screen.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub(super) fn open() -> io::Result<Self> {
        // The message of a panic is for the first screen.
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let _gone = restore();
            report(panic);
        }));
        terminal::enable_raw_mode()?;
        let screen = Self { shown: None };
        execute!(stdout(), EnterAlternateScreen, Hide)?;
        Ok(screen)
    }

    /// Draws a frame; the screen may have changed its size.
    ///
    /// # Errors
    /// The terminal cannot be written to.
    pub(super) fn draw(
        &mut self,
        view: &View<'_>,
        options: &Options,
        paint: Paint,
    ) -> io::Result<()> {
        let grid = draw(terminal::size()?, view, options, paint);
        let mut changes = Vec::new();
        grid.write_changes(self.shown.as_ref(), &mut changes)?;
        stdout().write_all(&changes)?;
        stdout().flush()?;
        self.shown = Some(grid);
        Ok(())
    }

    /// Has the next frame drawn as a whole.
    pub(super) fn clear(&mut self) {
        self.shown = None;
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _gone = restore();
    }
}

/// Shows the first screen again, with the cursor, unless it is shown already.
///
/// # Errors
/// The terminal is gone.
fn restore() -> io::Result<()> {
    if terminal::is_raw_mode_enabled()? {
        terminal::disable_raw_mode()?;
        execute!(stdout(), LeaveAlternateScreen, Show)?;
    }
    Ok(())
}

/// Reads keys on a thread that may block. Dropping it ends the thread.
pub(super) struct Keys {
    actions: mpsc::Receiver<Action>,
    is_over: Arc<AtomicBool>,
    _reader: JoinSet<()>,
}

impl Keys {
    pub(super) fn start() -> Self {
        let (sender, actions) = mpsc::channel(KEYS_MAX);
        let is_over = Arc::new(AtomicBool::new(false));
        let mut reader = JoinSet::new();
        let over = Arc::clone(&is_over);
        reader.spawn_blocking(move || read(&sender, &over));
        Self { actions, is_over, _reader: reader }
    }

    /// What the next key asks for; `None` if the terminal is gone.
    pub(super) async fn next(&mut self) -> Option<Action> {
        self.actions.recv().await
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
    }
}

fn read(actions: &mpsc::Sender<Action>, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        let read = match event::poll(LOOK) {
            Ok(false) => continue,
            Ok(true) => event::read(),
            Err(error) => Err(error),
        };
        let action = match read {
            Ok(Event::Key(key)) => action(key),
            Ok(Event::Resize(..)) => Some(Action::Redraw),
            Ok(_) => None,
            // The terminal is gone.
            Err(_) => return,
        };
        if let Some(action) = action
            && actions.blocking_send(action).is_err()
        {
            return;
        }
    }
}

/// What a key asks for.
fn action(key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Some(Action::Quit),
            KeyCode::Char('l') => Some(Action::Redraw),
            _ => None,
        };
    }
    Some(match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Action::Quit,
        KeyCode::Char('p' | ' ') => Action::Pause,
        KeyCode::Char('s') => Action::Sort,
        KeyCode::Char('m') => Action::Model,
        KeyCode::Up | KeyCode::Char('k') => Action::Scroll(-1),
        KeyCode::Down | KeyCode::Char('j') => Action::Scroll(1),
        KeyCode::PageUp => Action::Scroll(-PAGE_LINES),
        KeyCode::PageDown => Action::Scroll(PAGE_LINES),
        KeyCode::Home => Action::Scroll(isize::MIN),
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_tests::cluster::eventually;
    use splitrail_tests::pty::OnTerminal;

    use super::*;

    /// Set in the process that panics.
    const PANICS: &str = "SPLITRAIL_TEST_PANICS_ON_THE_SCREEN";

    #[tokio::test]
    async fn a_panic_restores_the_terminal_and_is_shown_on_it() {
        if std::env::var_os(PANICS).is_some() {
            let _screen = Screen::open().unwrap();
            panic!("planted");
        }
        let name = "top_command::terminal::tests::a_panic_restores_the_terminal_and_is_shown_on_it";
        let own = std::env::current_exe().unwrap();
        let arguments = ["--exact", name, "--nocapture", "--test-threads=1"];
        let mut terminal = OnTerminal::start(&own, &arguments, &[(PANICS, "1")], (80, 24));
        assert_ne!(terminal.ended().await.code(), Some(0));
        eventually("the panic is reported", async || terminal.output().contains("planted")).await;
        assert!(terminal.output().contains("\u{1b}[?1049h"), "the other screen was open");
        terminal.until_restored().await;
    }

    #[test]
    fn control_c_quits_and_a_plain_c_does_nothing() {
        let key = |code, modifiers| action(KeyEvent::new(KeyCode::Char(code), modifiers));
        assert_eq!(key('c', KeyModifiers::CONTROL), Some(Action::Quit));
        assert_eq!(key('c', KeyModifiers::NONE), None);
        assert_eq!(key('q', KeyModifiers::NONE), Some(Action::Quit));
    }
}
