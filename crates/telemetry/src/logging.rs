//! Logs go to stderr through `tracing`. No prompt, completion, token id or key is
//! ever a field of an event, at any level.

pub use splitrail_settings::logging::LogFormat;

/// Starts logging. `RUST_LOG` filters; the default is `info`.
pub fn init(format: LogFormat) {
    // At lower levels, this library logs the texts that it normalises.
    splitrail_settings::logging::init(format, &["tokenizers=info"]);
}
