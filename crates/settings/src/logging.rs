//! Logs go to stderr through `tracing`. No prompt, completion, token id or key is
//! ever a field of an event, at any level.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
pub use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Format;

use crate::Problem;
use crate::command::has_colours;

mod queue;
mod request;

use queue::LineWriter;
pub use queue::{CountLost, LineQueue, queue_lines};
use request::FormatWithIds;
pub use request::RequestIds;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Logs the warnings about a configuration, one record each.
pub fn warn_of(problems: &[Problem]) {
    for problem @ Problem { message, hint, .. } in problems {
        tracing::warn!(place = %problem.place(), hint, "configuration: {message}");
    }
}

/// Logs the mistakes of a configuration, one record each.
pub fn report(problems: &[Problem]) {
    for problem @ Problem { message, hint, .. } in problems {
        tracing::error!(place = %problem.place(), hint, "configuration: {message}");
    }
}

/// The level of a directive `TARGET=LEVEL`.
fn level_of(directive: &str) -> LevelFilter {
    let level = directive.rsplit_once('=').and_then(|(_, level)| level.parse().ok());
    level.unwrap_or(LevelFilter::OFF)
}

/// Starts logging, including panics. `RUST_LOG` sets the filter; without it, lines of `level` and
/// above are logged. `directives` are added to the filter: they silence libraries whose lower
/// levels would log content.
pub fn init(format: LogFormat, level: LevelFilter, directives: &[&str]) {
    let asked = std::env::var("RUST_LOG").ok().filter(|asked| !asked.is_empty());
    let parsed = asked.as_ref().map(EnvFilter::try_new).transpose();
    let ignored = parsed.as_ref().err().map(ToString::to_string);
    let filter = parsed.ok().flatten().unwrap_or_else(|| EnvFilter::new(level.to_string()));
    // A directive for a library replaces what the filter says of it, and so must not raise it.
    let most = filter.max_level_hint().unwrap_or(LevelFilter::TRACE);
    let caps = directives.iter().filter(|directive| level_of(directive) < most);
    let filter =
        caps.filter_map(|directive| directive.parse().ok()).fold(filter, EnvFilter::add_directive);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(LineWriter::default)
        // A full disk or a closed pipe loses log lines and must not affect the service.
        .log_internal_errors(false)
        .with_ansi(has_colours(&std::io::stderr()));
    // A second initialisation (tests in one process) keeps the first.
    let _already_set = match format {
        LogFormat::Text => {
            // The format knows of colours itself, because a line with ids is formatted apart.
            let colours = has_colours(&std::io::stderr());
            let with_ids = |format: Format| FormatWithIds {
                format: format.with_ansi(colours),
                is_json: false,
            };
            builder.map_event_format(with_ids).try_init()
        }
        LogFormat::Json => builder
            .json()
            .map_event_format(|format| FormatWithIds { format, is_json: true })
            .try_init(),
    };
    std::panic::set_hook(Box::new(log_panic));
    if let Some(problem) = ignored {
        tracing::warn!(problem, "RUST_LOG is invalid; logging at {level}");
    }
}

/// Logs where a panic happened, and the backtrace if `RUST_BACKTRACE` is set. The panic's message
/// is not logged: that of a failed `unwrap`, or of a text that was cut within a character, quotes
/// content.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or_default();
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => {
            tracing::error!(place, thread, %backtrace, "panicked; please report this");
        }
        _ => tracing::error!(place, thread, "panicked; please report this"),
    }
}
