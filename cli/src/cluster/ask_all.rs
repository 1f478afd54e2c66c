//! Asks all replicas at the same time.

use std::future::Future;

use splitrail_settings::command::exit;
use tokio::task::JoinSet;

use crate::admin::{AskError, Replica};

/// Asks all replicas at the same time; the results are in their order.
pub(crate) async fn ask_all<T, F>(
    replicas: &[Replica],
    ask: impl Fn(Replica) -> F,
) -> Vec<Result<T, AskError>>
where
    T: Send + 'static,
    F: Future<Output = Result<T, AskError>> + Send + 'static,
{
    let mut asked = JoinSet::new();
    for (at, replica) in replicas.iter().enumerate() {
        let reply = ask(replica.clone());
        asked.spawn(async move { (at, reply.await) });
    }
    // A defect in a task is a defect of the command.
    let mut replies = asked.join_all().await;
    replies.sort_unstable_by_key(|(at, _)| *at);
    replies.into_iter().map(|(_, reply)| reply).collect()
}

/// The exit code that says most of several: a replica that cannot be reached, then a credential that
/// is missing, then a refusal, then `otherwise`.
pub(crate) fn worst_code<'e>(errors: impl IntoIterator<Item = &'e AskError>, otherwise: u8) -> u8 {
    let codes: Vec<u8> = errors.into_iter().map(AskError::exit_code).collect();
    let order = [exit::UNAVAILABLE, exit::NO_PERMISSION, exit::DATA_ERROR];
    order.into_iter().find(|code| codes.contains(code)).unwrap_or(otherwise)
}
