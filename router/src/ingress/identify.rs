//! Identifies the sender of a request, before anything else is done for the request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use http::HeaderMap;
use splitrail_access::{CertificateNames, Refusal, Tenant};
use splitrail_api::error::Error;
use splitrail_api::memory_budget::MemoryBudget;
use splitrail_api::shares::ClientShare;

use crate::admission::Admission;
use crate::core::Core;
use splitrail_client_connection::certificate::ClientCertificate;

/// The sender of a request to a model.
#[derive(Clone)]
pub struct Sender {
    /// The tenant; `None` if the router has no tenants.
    pub tenant: Option<Arc<Tenant>>,
    /// The client to which the request's places are charged; `None` if places are not shared.
    pub share: Option<ClientShare>,
    /// The budget for the memory of the client's requests.
    pub memory: Arc<MemoryBudget>,
}

impl Sender {
    /// An operator at this address, who sends a request as one of the tenant.
    pub fn of_operator(core: &Core, tenant: Option<Arc<Tenant>>, peer: IpAddr) -> Self {
        let share = tenant.as_ref().map(|tenant| tenant.share);
        let holder = share.unwrap_or_else(|| core.admission.of_address(peer));
        Self { tenant, share, memory: core.memory.of_client(holder) }
    }

    /// The client whose share of the queue a request counts towards, and the number of the client's
    /// session; 0 without one, and if clients are not told apart.
    pub fn queue_share(&self, admission: &Admission, session: Option<&str>) -> (ClientShare, u64) {
        let Some(client) = self.share else { return (ClientShare::EVERYONE, 0) };
        (client, session.map_or(0, |session| admission.number_of_session(session)))
    }

    /// Whether the sender may use the model of this name.
    pub fn may_use(&self, model: &str) -> bool {
        self.tenant.as_ref().is_none_or(|tenant| tenant.may_use(model))
    }
}

/// Identifies the sender of a request. `certificate` is that of the connection, and `listener` the
/// name of the listener in metrics.
///
/// # Errors
/// A 401 if the request has no valid credential and needs one; a 403 if its credential is not for
/// requests to models.
pub fn identify(
    core: &Core,
    listener: &'static str,
    peer: IpAddr,
    headers: &HeaderMap,
    certificate: Option<&ClientCertificate>,
) -> Result<Sender, Error> {
    let certificate = certificate
        .map(|names| CertificateNames { uris: &names.uris, dns_names: &names.dns_names });
    let identified = core.access.load().client(headers, certificate, SystemTime::now());
    let tenant = identified.map_err(|refusal| refused(core, listener, peer, headers, refusal))?;
    let share = match &tenant {
        Some(tenant) => Some(tenant.share),
        None => {
            let serving = core.serving();
            core.admission.client(&serving.limits.fair_by, peer, headers)
        }
    };
    // Without shares, the address identifies the client.
    let holder = share.unwrap_or_else(|| core.admission.of_address(peer));
    Ok(Sender { tenant, share, memory: core.memory.of_client(holder) })
}

/// Counts and records a refused credential; returns the error for the client.
pub fn refused(
    core: &Core,
    listener: &'static str,
    peer: IpAddr,
    headers: &HeaderMap,
    refusal: Refusal,
) -> Error {
    core.metrics.refused_credentials.with_label_values(&[listener, refusal.name()]).inc();
    core.logs.audit.refused(listener, peer, refusal.name());
    refusal.to_error(headers)
}
