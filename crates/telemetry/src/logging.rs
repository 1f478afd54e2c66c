//! Logs go to stderr through `tracing`. No prompt, completion, token id, key or certificate of a
//! client is ever a field of an event, at any level.

pub use splitrail_settings::logging::{LevelFilter, LogFormat};

/// What libraries may log. At lower levels, `tokenizers` logs the texts that it normalises, and
/// `rustls` the certificates of clients (TLS 1.2). The module has a line of its own, so that
/// `RUST_LOG` cannot name it more exactly than the line of the whole library does. `kube` logs each
/// failed request, which discovery logs at a bounded rate.
const LIBRARIES: [&str; 5] = [
    "tokenizers=info",
    "rustls=debug",
    "rustls::server::tls12=debug",
    "kube_client=off",
    "kube_runtime=off",
];

/// Starts logging. `RUST_LOG` filters; without it, lines of `level` and above are logged.
pub fn init(format: LogFormat, level: LevelFilter) {
    splitrail_settings::logging::init(format, level, &LIBRARIES);
}
