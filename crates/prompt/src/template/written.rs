//! The text that a filter writes: its size is bounded, and writing ends with the render's time.

use minijinja::{Error, ErrorKind};

use super::super::watch;

/// A text within the bound on the size of the prompt that is rendered on this thread.
#[derive(Default)]
pub(super) struct BoundedText(String);

impl BoundedText {
    /// Appends a text.
    ///
    /// # Errors
    /// If the whole text would be longer than a prompt may be; nothing is appended then.
    pub(super) fn push_str(&mut self, text: &str) -> Result<(), Error> {
        self.check_room(text.len())?;
        self.0.push_str(text);
        Ok(())
    }

    /// Appends a character.
    ///
    /// # Errors
    /// As [`Self::push_str`].
    pub(super) fn push(&mut self, ch: char) -> Result<(), Error> {
        self.check_room(ch.len_utf8())?;
        self.0.push(ch);
        Ok(())
    }

    /// Fails if the render must end, because its time is over or its client has left. To be called
    /// for each value or line that is written.
    pub(super) fn check_time(&self) -> Result<(), Error> {
        match watch::render_is_over() {
            true => Err(ErrorKind::OutOfFuel.into()),
            false => Ok(()),
        }
    }

    /// The whole text.
    pub(super) fn into_text(self) -> String {
        self.0
    }

    fn check_room(&self, bytes: usize) -> Result<(), Error> {
        match watch::render_has_room(self.0.len() + bytes) {
            true => Ok(()),
            false => Err(ErrorKind::OutOfFuel.into()),
        }
    }
}
