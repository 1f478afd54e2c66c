//! Explains the placement of a request for operators on either listener, in counts, hashes and
//! names.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::core::Core;
use splitrail_access::Tenant;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::MemoryBudget;
use splitrail_api::steering::Steering;
use splitrail_flow::explain::explain;
use splitrail_flow::prepare::{Payload, prepare};
use splitrail_ledger::decisions::{Decision, DecisionFilter};

/// Maximum time for which a dry run waits for others.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for a permit, which a dry run holds so that dry runs take few of the cores that prepare
/// requests of clients.
///
/// # Errors
/// A 503 if no permit is free within `PERMIT_TIMEOUT`.
pub async fn permit(permits: &Semaphore) -> Result<SemaphorePermit<'_>, Error> {
    // The semaphore is never closed: that no permit comes means that others have all.
    let permit = timeout(PERMIT_TIMEOUT, permits.acquire()).await.ok().and_then(Result::ok);
    let message = "other requests are being explained; retry later";
    permit.ok_or_else(|| Error::new(ErrorKind::Overloaded, message))
}

/// What would be decided for a request of this tenant. No leg is sent, nothing is booked or counted,
/// and what the preparation takes is charged to `memory`.
///
/// # Errors
/// Those of the front door.
pub async fn dry_run(
    core: &Arc<Core>,
    endpoint: Endpoint,
    payload: Payload,
    steering: Steering,
    tenant: Option<&Arc<Tenant>>,
    memory: &Arc<MemoryBudget>,
) -> Result<Value, Error> {
    let prepared = prepare(&core.preparer, endpoint, payload, tenant, memory).await?;
    let explanation = explain(&prepared, steering)?;
    Ok(json!({ "dry_run": true, "explanation": explanation }))
}

/// The decisions for a recently served request; `None` if none of them is kept.
///
/// With a tenant, decisions for requests of other tenants are not shown.
pub fn past(core: &Core, request_id: &str, tenant: Option<&Tenant>) -> Option<Value> {
    let filter = DecisionFilter { request_id: Some(request_id.to_owned()), ..Default::default() };
    let mut decisions = core.decisions.find(&filter);
    if let Some(tenant) = tenant {
        decisions.retain(|decision| decision.tenant.as_deref() == Some(&*tenant.name));
    }
    decisions.sort_by_key(|decision| decision.prompt_index);
    let serving = core.serving();
    let explained: Vec<Value> = decisions
        .iter()
        .map(|decision| {
            let policy = serving.model(&decision.model).map(|served| &served.config.policy);
            json!({
                "decision": decision,
                "choices": choices(decision),
                "cost_unit": policy.map(|policy| policy.cost_unit()),
            })
        })
        .collect();
    (!explained.is_empty()).then(|| json!({ "dry_run": false, "decisions": explained }))
}

/// The message for a request without kept decisions.
pub fn not_kept(core: &Core, request_id: &str) -> String {
    let kept = core.serving().limits.decisions_kept;
    format!(
        "no decision of request {request_id} is kept; the last {kept} are (limits.decisions_kept), \
         and for hours the slowest, failed and retried ones of each minute. The access log (standard \
         output, or `access_log.path`) has a line for each request"
    )
}

/// The chosen worker of each leg, the second best, and the difference of their costs.
fn choices(decision: &Decision) -> Vec<Value> {
    let chosen = decision.candidates.iter().filter(|candidate| candidate.chosen);
    chosen
        .map(|chosen| {
            let next = decision.runner_up(chosen);
            json!({
                "leg": chosen.leg,
                "chosen": chosen.worker,
                "chosen_rank": chosen.rank,
                "runner_up": next.map(|next| &next.worker),
                "runner_up_rank": next.and_then(|next| next.rank),
                "margin": next.map(|next| next.cost - chosen.cost),
            })
        })
        .collect()
}
