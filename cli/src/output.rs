//! What a command prints, with its exit code.

use splitrail_settings::command::{Failure, print_line};

/// What a command prints, and its exit code. The text says why the code is not 0.
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) code: u8,
}

impl Output {
    /// Prints the text.
    ///
    /// # Errors
    /// The code is not 0, or the text cannot be written.
    pub(crate) fn print(self) -> Result<(), Failure> {
        print_line(&self.text)?;
        match self.code {
            0 => Ok(()),
            code => Err(Failure::already_reported(code)),
        }
    }
}
