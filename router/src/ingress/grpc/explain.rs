//! The call `Explain`: the facts of `POST /admin/explain`, for operators.
//!
//! They include other clients' load and which prompts are cached, so the call is refused unless the
//! configuration allows it. A loopback address does not prove that the client is an operator:
//! behind a proxy on the same host, every client has a loopback address.

use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use splitrail_proto::v1;
use splitrail_proto::v1::explain_request::Subject;
use splitrail_proto::v1::generate_request::Prompt;
use tonic::Status;

use super::super::connection_service::Caller;
use super::body::payload;
use super::call::{CallLog, CallReply, ReceivedCall, received, whole};
use super::decode::{DecodedMessage, decode};
use super::weigh::explained_bytes;
use crate::core::Core;
use crate::service::explain::{dry_run, not_kept, past, permit};
use splitrail_api::Endpoint;
use splitrail_api::steering::Steering;

const NOT_ALLOWED: &str = "Explain shows other clients' load and cached prompts, and is off: set \
                           `listen.grpc_explain: true` where only operators reach `listen.grpc`, or \
                           use `POST /admin/explain` on `listen.admin`";

/// Explains a given request, or one that was served recently.
pub(super) async fn explain(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<impl http_body::Body<Data = Bytes> + Unpin>,
    log: CallLog<'_>,
) -> Result<CallReply, Status> {
    if !core.serving().config.listen.grpc_explain {
        return Err(Status::permission_denied(NOT_ALLOWED));
    }
    let steering = Steering::read(request.headers());
    // The message's memory is held until the reply is made.
    let ReceivedCall { message, held, sender } = received(core, caller, request, log).await?;
    let tenant = sender.tenant.as_ref();
    if tenant.is_some_and(|tenant| !tenant.debug) {
        let message = "Explain is for tenants with `debug: true`";
        return Err(Status::permission_denied(message));
    }
    let (asked, _held): (DecodedMessage<v1::ExplainRequest>, _) =
        decode(core, message.clone(), held, explained_bytes).await?;
    let explained = match &asked.subject {
        None => {
            let missing = "name what to explain: `request` or `request_id`";
            return Err(Status::invalid_argument(missing));
        }
        Some(Subject::RequestId(id)) => past(core, id, tenant.map(|tenant| &**tenant))
            .ok_or_else(|| Status::not_found(not_kept(core, id)))?,
        Some(Subject::Request(_)) => {
            let steering = steering.map_err(|error| error.to_grpc())?;
            let request = asked.map(|asked| match asked.subject {
                Some(Subject::Request(request)) => request,
                _ => v1::GenerateRequest::default(),
            });
            let is_chat = matches!(request.prompt, Some(Prompt::Chat(_)));
            let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
            let (request, memory) = (payload(request, &message), &sender.memory);
            let _permit = permit(&core.dry_runs).await.map_err(|error| error.to_grpc())?;
            let explained = dry_run(core, endpoint, request, steering, tenant, memory);
            explained.await.map_err(|error| error.to_grpc())?
        }
    };
    Ok(whole(&v1::ExplainResponse { explanation_json: explained.to_string() }))
}
