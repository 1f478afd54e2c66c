//! Mistakes in a configuration, with their places.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::command::Paint;
use crate::words::shown;

/// Maximum number of mistakes that are listed; further ones are only counted.
const LISTED_MAX: usize = 100;

/// A place in a file; both numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The line number.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

impl Place {
    /// The first character of the file.
    pub const START: Self = Self { line: 1, column: 1 };

    /// The place of the first character after `text`.
    pub fn after(text: &str) -> Self {
        let line_start = text.rfind('\n').map_or(0, |newline| newline + 1);
        Self {
            line: text.matches('\n').count() + 1,
            column: text[line_start..].chars().count() + 1,
        }
    }
}

/// A mistake or a warning, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file's name, as it was given.
    pub file: String,
    /// The line, from 1; 0 for what is in no line, such as a flag of the command line.
    pub line: usize,
    /// The character within the line, from 1.
    pub column: usize,
    /// What is wrong. Never contains a secret.
    pub message: String,
    /// What to do about it.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.painted(Paint::NONE))
    }
}

impl Problem {
    /// The file with line and column, or alone for what is in no line.
    pub fn place(&self) -> String {
        let Self { file, line, column, .. } = self;
        match line {
            0 => file.clone(),
            _ => format!("{file}:{line}:{column}"),
        }
    }

    /// Place, message and hint, with colours.
    #[must_use]
    pub fn painted(&self, paint: Paint) -> String {
        let Self { message, hint, .. } = self;
        let place = paint.strong(&format!("{}:", self.place()));
        format!("{place} {message}\n  {} {hint}", paint.hint("hint:"))
    }
}

/// All mistakes of a file, at least one, sorted by place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    listed: Vec<Problem>,
    omitted: usize,
    unreadable: bool,
}

impl Problems {
    /// The mistakes, sorted by place; if there are more than a hundred, the first hundred.
    #[must_use]
    pub fn as_slice(&self) -> &[Problem] {
        &self.listed
    }

    /// Changes each listed mistake.
    pub fn edit(&mut self, change: impl FnMut(&mut Problem)) {
        self.listed.iter_mut().for_each(change);
    }

    /// Whether the file is missing or cannot be read, so that there is no text to check.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        self.unreadable
    }

    pub(crate) fn of_unreadable_file(self) -> Self {
        Self { unreadable: true, ..self }
    }

    /// All listed mistakes, with colours, and the number of the others.
    #[must_use]
    pub fn painted(&self, paint: Paint) -> String {
        let mut lines: Vec<String> =
            self.listed.iter().map(|problem| problem.painted(paint)).collect();
        if self.omitted > 0 {
            lines.push(format!("... and {} more", self.omitted));
        }
        lines.join("\n")
    }

    /// Number of all mistakes, listed or not.
    #[must_use]
    pub fn count(&self) -> usize {
        self.listed.len() + self.omitted
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.painted(Paint::NONE))
    }
}

impl std::error::Error for Problems {}

/// Collects problems while a file is checked.
#[derive(Debug)]
pub struct ProblemReport {
    file: String,
    errors: Vec<Problem>,
    errors_omitted: usize,
    warnings: Vec<Problem>,
    /// Texts that no message repeats, by their place, each with what is shown in its stead.
    hidden: HashMap<Place, (String, String)>,
    /// Places of values that are not known, about which nothing else can be wrong.
    unknown: HashSet<Place>,
}

impl ProblemReport {
    /// An empty report for the file of that name.
    pub fn new(file: &str) -> Self {
        Self {
            file: file.to_owned(),
            errors: Vec::new(),
            errors_omitted: 0,
            warnings: Vec::new(),
            hidden: HashMap::new(),
            unknown: HashSet::new(),
        }
    }

    /// Shows `written` instead of `text`, which is in quotes, in messages about the value at `at`.
    pub(crate) fn hide(&mut self, at: Place, text: &str, written: &str) {
        let quoted = |text: &str| format!("\"{}\"", shown(text));
        self.hidden.insert(at, (quoted(text), quoted(written)));
    }

    /// Adds the mistake that a value is not known. Nothing else is reported about it.
    pub(crate) fn unknown(&mut self, at: Place, message: String, hint: impl Into<String>) {
        self.error(at, message, hint);
        self.unknown.insert(at);
    }

    /// Adds a mistake.
    pub fn error(&mut self, at: Place, message: String, hint: impl Into<String>) {
        if self.unknown.contains(&at) {
            return;
        }
        if self.errors.len() < LISTED_MAX {
            self.errors.push(self.problem(at, message, hint.into()));
        } else {
            self.errors_omitted += 1;
        }
    }

    /// Adds a warning of something that is allowed but perhaps not intended.
    pub fn warn(&mut self, at: Place, message: String, hint: impl Into<String>) {
        if self.warnings.len() < LISTED_MAX {
            self.warnings.push(self.problem(at, message, hint.into()));
        }
    }

    pub(crate) fn has_errors(&self) -> bool {
        !self.errors.is_empty()
    }

    /// All mistakes, sorted by place.
    pub fn into_problems(self) -> Problems {
        Problems { listed: sorted(self.errors), omitted: self.errors_omitted, unreadable: false }
    }

    pub(crate) fn into_warnings(self) -> Vec<Problem> {
        sorted(self.warnings)
    }

    fn problem(&self, at: Place, message: String, hint: String) -> Problem {
        let (message, hint) = match self.hidden.get(&at) {
            Some((text, written)) => (message.replace(text, written), hint.replace(text, written)),
            None => (message, hint),
        };
        Problem { file: self.file.clone(), line: at.line, column: at.column, message, hint }
    }
}

fn sorted(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by_key(|problem| (problem.line, problem.column));
    problems
}
