//! Colours on terminals.

use std::io::{self, IsTerminal};

/// Whether what is written to a stream may have colours: it is a terminal, `NO_COLOR` is not set
/// (<https://no-color.org>), and the terminal has colours.
#[must_use]
pub fn has_colours(stream: &impl IsTerminal) -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_set("NO_COLOR") && std::env::var_os("TERM") != Some("dumb".into())
}

/// Gives texts colours, or leaves them as they are.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    has_colours: bool,
}

impl Paint {
    /// No colours.
    pub const NONE: Self = Self { has_colours: false };

    /// Colours for standard output, if it may have them.
    #[must_use]
    pub fn of_stdout() -> Self {
        Self { has_colours: has_colours(&io::stdout()) }
    }

    /// Colours for standard error, if it may have them.
    #[must_use]
    pub fn of_stderr() -> Self {
        Self { has_colours: has_colours(&io::stderr()) }
    }

    /// What a reader should see first.
    #[must_use]
    pub fn strong(self, text: &str) -> String {
        self.with("1", text)
    }

    /// What matters less than the rest.
    #[must_use]
    pub fn faint(self, text: &str) -> String {
        self.with("2", text)
    }

    /// What is well, or was chosen.
    #[must_use]
    pub fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    /// What is perhaps not intended.
    #[must_use]
    pub fn warning(self, text: &str) -> String {
        self.with("33", text)
    }

    /// What to do.
    #[must_use]
    pub fn hint(self, text: &str) -> String {
        self.with("36", text)
    }

    /// The text with a parameter of "select graphic rendition" (ECMA-48, section 8.3.117).
    fn with(self, parameter: &str, text: &str) -> String {
        match self.has_colours && !text.is_empty() {
            true => format!("\x1b[{parameter}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_colours_or_is_as_it_was() {
        assert_eq!(Paint::NONE.good("ok"), "ok");
        assert_eq!(Paint { has_colours: true }.good("ok"), "\x1b[32mok\x1b[0m");
        assert_eq!(Paint { has_colours: true }.good(""), "");
    }
}
