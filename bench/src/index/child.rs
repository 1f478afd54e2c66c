//! Runs one index alone in a child process, if its memory is measured, or if a panic or a hang must
//! not end the run.
//!
//! A child prints one JSON object per line after each step. The parent merges the objects, so that
//! figures from before a failure are kept.

use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use serde_json::{Map, Value};

use super::run::Run;

/// The result of a child process.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The figures that it printed.
    pub figures: Map<String, Value>,
    /// The reason why it failed; `None` if it succeeded.
    pub failure: Option<String>,
}

impl Outcome {
    /// The figure with a name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.figures.get(name)?.as_f64()
    }
}

/// Runs a case with one index in a child process, for at most the time `limit`.
///
/// # Errors
/// The process cannot be started. A failure of the process is part of the result.
pub fn run_alone(run: &Run, index: &str, case: &str, limit: Duration) -> io::Result<Outcome> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--child", index, case])
        .args(&run.trace_args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let errors = scope.spawn(move || read_all(stderr.as_mut()));
        let (end, ended) = sync_channel(1);
        let output = scope.spawn(move || {
            let text = read_all(stdout.as_mut());
            // After the limit, the receiver is gone.
            let _late = end.send(());
            text
        });
        let late = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
        if late {
            child.kill()?;
        }
        let status = child.wait()?;
        let output = output.join().unwrap_or_default();
        let errors = errors.join().unwrap_or_default();
        let panicked = errors.lines().position(|line| line.contains("panicked at"));
        let failure = match (panicked, late, status.success()) {
            (Some(at), late, _) => {
                let message = errors.lines().nth(at + 1).unwrap_or_default();
                let hung = if late { "; then hung" } else { "" };
                Some(format!("panicked: {message}{hung}"))
            }
            (None, true, _) => Some(format!("not done after {} s", limit.as_secs())),
            (None, false, false) => Some(errors.lines().last().unwrap_or("failed").to_owned()),
            (None, false, true) => None,
        };
        Ok(Outcome { figures: merged(&output), failure })
    })
}

fn read_all(from: Option<&mut impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // The bytes from before an error are kept.
        let _failed = from.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn merged(output: &str) -> Map<String, Value> {
    let mut figures = Map::new();
    for line in output.lines() {
        if let Ok(Value::Object(object)) = serde_json::from_str(line) {
            figures.extend(object);
        }
    }
    figures
}
