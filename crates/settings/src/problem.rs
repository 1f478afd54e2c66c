//! Mistakes in a configuration, with their places.

use std::fmt;

/// Maximum number of mistakes that are listed; further ones are only counted.
const LISTED_MAX: usize = 100;

/// A place in a file; both numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
        let Self { message, hint, .. } = self;
        write!(out, "{}: {message}\n  hint: {hint}", self.place())
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

    /// Number of all mistakes, listed or not.
    #[must_use]
    pub fn count(&self) -> usize {
        self.listed.len() + self.omitted
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.listed.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(out, "{separator}{problem}")?;
        }
        match self.omitted {
            0 => Ok(()),
            omitted => write!(out, "\n... and {omitted} more"),
        }
    }
}

impl std::error::Error for Problems {}

/// Collects problems while a file is checked.
#[derive(Debug)]
pub struct Report {
    file: String,
    errors: Vec<Problem>,
    errors_omitted: usize,
    warnings: Vec<Problem>,
}

impl Report {
    /// An empty report for the file of that name.
    pub fn new(file: &str) -> Self {
        Self { file: file.to_owned(), errors: Vec::new(), errors_omitted: 0, warnings: Vec::new() }
    }

    /// Adds a mistake.
    pub fn error(&mut self, at: Place, message: String, hint: impl Into<String>) {
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
        Problem { file: self.file.clone(), line: at.line, column: at.column, message, hint }
    }
}

fn sorted(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by_key(|problem| (problem.line, problem.column));
    problems
}
