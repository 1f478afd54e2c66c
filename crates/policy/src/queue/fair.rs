//! Fairness between tenants, and between the sessions of each tenant: start-time fair queueing.
//!
//! Each tenant has a virtual time. Each release advances it by the prefill of the release divided
//! by the tenant's weight. The queue's virtual time is that of the waiting tenant that has received
//! least. A tenant that comes after a pause starts at this time: it cannot save up time. The sessions
//! of a tenant share in the same way what the tenant receives, with equal weights.

use std::collections::HashMap;

/// Maximum number of clients that are remembered although they have no waiting request. Beyond it,
/// the client that is least ahead is forgotten, and its lead with it.
const REMEMBERED_MAX: usize = 4096;

/// Whom a waiting request counts for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Payer {
    /// The tenant to which the request is charged.
    pub tenant: u64,
    /// The tenant's share of the fleet relative to other tenants; above 0.
    pub tenant_weight: f64,
    /// The session of the tenant; all requests that name none have the same number.
    pub session: u64,
}

impl Payer {
    /// Stands for all clients, if they are not distinguished.
    pub const EVERYONE: Self = Self { tenant: 0, tenant_weight: 1.0, session: 0 };
}

/// The amount of work that tenants and their sessions have received.
#[derive(Clone, Debug, Default)]
pub(super) struct ReceivedWork {
    tenants: Shares,
    /// The sessions of each tenant that has a waiting request.
    sessions: HashMap<u64, Shares>,
}

impl ReceivedWork {
    /// Records that one more request waits.
    pub(super) fn joined(&mut self, payer: Payer) {
        self.tenants.joined(payer.tenant);
        self.sessions.entry(payer.tenant).or_default().joined(payer.session);
    }

    /// Records that a request left the queue without being served.
    pub(super) fn left(&mut self, payer: Payer) {
        self.served(payer, 0.0);
    }

    /// Records that a request was released, with the predicted time of its prefill.
    pub(super) fn served(&mut self, payer: Payer, prefill_ms: f64) {
        self.tenants.served(payer.tenant, prefill_ms / payer.tenant_weight.max(1e-6));
        if !self.tenants.waits(payer.tenant) {
            self.sessions.remove(&payer.tenant);
        } else if let Some(sessions) = self.sessions.get_mut(&payer.tenant) {
            sessions.served(payer.session, prefill_ms);
        }
    }

    /// Whether the tenant, and whether its session, is ahead by more than this of the one among its
    /// like that waits and has received least.
    pub(super) fn is_ahead(&self, payer: Payer, lead_ms: f64) -> (bool, bool) {
        let sessions = self.sessions.get(&payer.tenant);
        let session_ms = sessions.map_or(0.0, |sessions| sessions.ahead_ms(payer.session));
        (self.tenants.ahead_ms(payer.tenant) > lead_ms, session_ms > lead_ms)
    }
}

/// The work that clients of one kind have received.
#[derive(Clone, Debug, Default)]
struct Shares {
    clients: HashMap<u64, Client>,
    virtual_ms: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Client {
    virtual_ms: f64,
    waiting: usize,
}

impl Shares {
    fn joined(&mut self, client: u64) {
        self.advance();
        let begin = self.virtual_ms;
        let client = self.clients.entry(client).or_default();
        client.virtual_ms = client.virtual_ms.max(begin);
        client.waiting += 1;
    }

    /// One request less waits, after so much work.
    fn served(&mut self, client: u64, work_ms: f64) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.virtual_ms += work_ms;
            client.waiting = client.waiting.saturating_sub(1);
        }
        self.forget();
    }

    fn waits(&self, client: u64) -> bool {
        self.clients.get(&client).is_some_and(|client| client.waiting > 0)
    }

    /// By how much a client is ahead of the waiting client that has received least.
    fn ahead_ms(&self, client: u64) -> f64 {
        self.clients.get(&client).map_or(0.0, |client| client.virtual_ms - self.virtual_ms)
    }

    fn advance(&mut self) {
        let waiting = self.clients.values().filter(|client| client.waiting > 0);
        let least = waiting.map(|client| client.virtual_ms).fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            self.virtual_ms = self.virtual_ms.max(least);
        }
    }

    /// Forgets clients that have no waiting request and are not ahead.
    fn forget(&mut self) {
        self.advance();
        let now = self.virtual_ms;
        self.clients.retain(|_, client| client.waiting > 0 || client.virtual_ms > now);
        while self.clients.len() > REMEMBERED_MAX {
            let gone = self.clients.iter().filter(|(_, client)| client.waiting == 0);
            let least = gone.min_by(|a, b| a.1.virtual_ms.total_cmp(&b.1.virtual_ms));
            let Some(number) = least.map(|(number, _)| *number) else { break };
            self.clients.remove(&number);
        }
    }
}
