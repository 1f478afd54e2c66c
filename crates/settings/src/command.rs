//! What the commands of both programs share: exit codes, failures and output.

use std::io::{self, Write as _};
use std::process::ExitCode;

mod about;
mod arguments;
mod colour;

use crate::{Problems, logging};
pub use about::{AboutCommand, Build};
pub use arguments::{VariableName, describe, parse, variable_name};
pub use colour::{Paint, has_colours};

/// Exit codes: those of `sysexits.h`, [`ATTENTION`](exit::ATTENTION), and the one of shells for a
/// process that a signal has ended.
pub mod exit {
    /// Something that was asked about is not as it should be.
    pub const ATTENTION: u8 = 1;
    /// The arguments are wrong.
    pub const USAGE: u8 = 64;
    /// The data that the command reads is wrong.
    pub const DATA_ERROR: u8 = 65;
    /// A file cannot be read.
    pub const NO_INPUT: u8 = 66;
    /// A service or resource is not available.
    pub const UNAVAILABLE: u8 = 69;
    /// The program has a defect.
    pub const SOFTWARE: u8 = 70;
    /// A function of the operating system failed.
    pub const OS_ERROR: u8 = 71;
    /// Output cannot be written.
    pub const IO_ERROR: u8 = 74;
    /// A change was not made, or not proved, everywhere: the command may be run again.
    pub const INCOMPLETE: u8 = 75;
    /// A credential is missing, or does not suffice.
    pub const NO_PERMISSION: u8 = 77;
    /// The configuration is wrong.
    pub const CONFIG: u8 = 78;
    /// The person who ran the command has interrupted it.
    pub const INTERRUPTED: u8 = 130;
}

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code; see [`exit`].
    pub code: u8,
    /// What is wrong, for the person who ran the command; empty if the output says it.
    pub message: String,
}

impl Failure {
    /// A failure with one of the codes of [`exit`].
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// A failure that the command's output explains.
    pub fn already_reported(code: u8) -> Self {
        Self::new(code, "")
    }

    /// The failure for a file that cannot be written; the error names it.
    pub fn unwritten(error: &io::Error) -> Self {
        Self::new(exit::IO_ERROR, error.to_string())
    }

    /// The failure for a configuration that cannot be used; its message lists all problems. With
    /// `logs`, each problem becomes a log record, and the message only counts the problems.
    pub fn of_problems(problems: &Problems, logs: bool) -> Self {
        let code = if problems.is_unreadable() { exit::NO_INPUT } else { exit::CONFIG };
        if !logs {
            return Self::new(code, problems.painted(Paint::of_stderr()));
        }
        logging::report(problems.as_slice());
        Self::new(code, format!("the configuration has {} problem(s)", problems.count()))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(exit::OS_ERROR, error.to_string())
    }
}

/// Reports the failure of a command, with `logs` as a log record and otherwise on stderr, and
/// returns the exit code of the process.
pub fn finish(outcome: Result<(), Failure>, logs: bool) -> ExitCode {
    let Err(Failure { code, message }) = outcome else { return ExitCode::SUCCESS };
    match logs {
        true => tracing::error!(exit_code = code, "{message}"),
        false if message.is_empty() => {}
        false => print_error(&message),
    }
    code.into()
}

/// Writes the output of a command to stdout; logs go to stderr. A closed pipe is not an error.
///
/// # Errors
/// If the line cannot be written.
pub fn print_line(text: &str) -> Result<(), Failure> {
    print_text(format!("{text}\n").as_bytes())
}

/// Writes output that has its own line ends to stdout. A closed pipe is not an error.
///
/// # Errors
/// If it cannot be written.
pub fn print_text(text: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let message = format!("cannot write to standard output: {error}");
            Err(Failure::new(exit::IO_ERROR, message))
        }
        _ => Ok(()),
    }
}

/// Writes a line to stderr. If it cannot be written, only the exit code reports the error.
pub fn print_error(text: &str) {
    let _unwritten = writeln!(io::stderr(), "{text}");
}
