//! What came of a change that is made on every replica.

use splitrail_settings::command::exit;

use crate::admin::AskError;
use crate::cluster::worst_code;

/// The name of a replica, and what came of the change there.
pub(crate) type ChangeResult<T> = (String, Result<T, AskError>);

/// The exit code: 0 if the change was made everywhere, that of the worst error if it was made
/// nowhere, and otherwise that of an incomplete change.
pub(crate) fn code<T>(changed: &[ChangeResult<T>]) -> u8 {
    let errors: Vec<_> = changed.iter().filter_map(|(_, reply)| reply.as_ref().err()).collect();
    match errors.len() {
        0 => 0,
        failed if failed < changed.len() => exit::INCOMPLETE,
        _ => worst_code(errors, exit::UNAVAILABLE),
    }
}

/// A line for a change that was made on some replicas only: what to do.
pub(crate) fn summary<T>(changed: &[ChangeResult<T>], done: &str, again: &str) -> Option<String> {
    let all = changed.len();
    let count = changed.iter().filter(|(_, reply)| reply.is_ok()).count();
    (count > 0 && count < all)
        .then(|| format!("incomplete: {done} on {count} of {all} routers; {again}"))
}
