//! Identifies the senders of requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use splitrail_config::Problems;
use splitrail_config::jwks::BadJwksUrl;
use splitrail_config::keys::OperatorRole;
use splitrail_config::model::{Auth, CertificateName, Config, Quotas};
use splitrail_settings::SecretError;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::metrics::Scope;

use crate::credential;
use crate::issuer::Issuer;
use crate::jwt::Claims;
use crate::keys::{Grant, KeyHolder, KeySource};
#[cfg(feature = "nats")]
use crate::limits::replicas::Replicas;
use crate::limits::{LimitCounting, SteadyClock};
use crate::refusal::Refusal;
use crate::salt::SaltKey;
use crate::tenant::Tenant;

/// The names that a verified client certificate contains.
#[derive(Clone, Copy, Debug, Default)]
pub struct CertificateNames<'a> {
    /// URIs of the subject alternative names.
    pub uris: &'a [Box<str>],
    /// DNS names of the subject alternative names.
    pub dns_names: &'a [Box<str>],
}

/// What one configuration says about who may use the router. A reload replaces it as a whole.
pub struct Access {
    /// Whether requests need a credential.
    asks: bool,
    keys: Vec<Arc<KeySource>>,
    issuers: Vec<TrustedIssuer>,
    certificate: Option<CertificateName>,
    /// The tenants, by name and by identity.
    tenants: HashMap<Box<str>, Arc<Tenant>>,
    /// The tenant of requests without a credential.
    default: Option<Arc<Tenant>>,
    counting: LimitCounting,
    clock: SteadyClock,
    salt_key: SaltKey,
}

/// An issuer, and the tenants that its tokens may name.
struct TrustedIssuer {
    issuer: Arc<Issuer>,
    /// The names of the tenants; `None` for all.
    tenants: Option<Vec<String>>,
}

impl TrustedIssuer {
    fn may_name(&self, tenant: &Tenant) -> bool {
        self.tenants.as_ref().is_none_or(|names| names.iter().any(|name| **name == *tenant.name))
    }
}

/// The sender of a request to the admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// What the operator may do.
    pub role: OperatorRole,
    /// The id of the operator's key, or the tenant in the operator's token.
    pub key: Arc<str>,
}

/// Why the access to a router cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A file of keys cannot be used.
    #[error("auth: {0}")]
    Keys(Problems),
    /// The URL of an issuer's keys cannot be used.
    #[error("auth: {0}")]
    Jwks(#[from] BadJwksUrl),
    /// The secret from which salts are derived cannot be read.
    #[error("cache_salt_key: {0}")]
    SaltKey(#[from] SecretError),
}

/// Where a configuration has limits counted.
#[cfg_attr(not(feature = "nats"), allow(unused_variables))]
fn counting(config: &Config, clock: SteadyClock) -> LimitCounting {
    match &config.quotas {
        Quotas::Local(local) => LimitCounting::Local(local.share),
        #[cfg(feature = "nats")]
        Quotas::Nats(quotas) => LimitCounting::Shared(Arc::new(Replicas::new(quotas, clock))),
        // The check of a configuration refuses what this build lacks.
        #[cfg(not(feature = "nats"))]
        Quotas::Nats(_) => LimitCounting::Local(1.0),
    }
}

impl Access {
    /// Builds the access of a configuration. `before` is that of the previous configuration, whose
    /// requests are still in flight.
    ///
    /// # Errors
    /// A file that the configuration names cannot be used.
    pub fn new(
        config: &Config,
        metrics: &Metrics,
        before: Option<&Self>,
    ) -> Result<Self, AccessError> {
        let secret = config.cache_salt_key.as_ref().map(|secret| secret.resolve()).transpose()?;
        let salt_key = SaltKey::new(secret.as_ref().map(|secret| secret.expose()));
        let clock = before.map_or_else(SteadyClock::start, |before| before.clock);
        let counting =
            before.map_or_else(|| counting(config, clock), |before| before.counting.clone());
        let mut tenants: HashMap<Box<str>, Arc<Tenant>> = HashMap::new();
        for (place, of) in config.tenants.iter().enumerate() {
            let earlier = before.and_then(|before| before.tenants.get(of.name.as_str()));
            // Before, the name may have been an identity of another tenant.
            let earlier = earlier.filter(|tenant| *tenant.name == *of.name);
            let earlier = earlier.map(|tenant| &**tenant);
            let tenant = Tenant::new(of, place, salt_key.clone(), &counting, clock, earlier);
            let tenant = Arc::new(tenant);
            for name in std::iter::once(&of.name).chain(&of.identities) {
                tenants.insert(name.as_str().into(), Arc::clone(&tenant));
            }
        }
        let mut keys = Vec::new();
        let mut issuers = Vec::new();
        let mut certificate = None;
        for auth in &config.auth {
            match auth {
                Auth::Keys { file } => {
                    keys.push(Arc::new(KeySource::open(file).map_err(AccessError::Keys)?));
                }
                Auth::Jwt(auth) => {
                    let known = before.into_iter().flat_map(|before| &before.issuers);
                    let mut known = known.filter(|known| known.issuer.is_configured_as(auth));
                    let issuer = match known.next() {
                        Some(known) => Arc::clone(&known.issuer),
                        None => Arc::new(Issuer::new(auth, metrics)?),
                    };
                    issuers.push(TrustedIssuer { issuer, tenants: auth.tenants.clone() });
                }
                Auth::ClientCertificate { tenant } => certificate = Some(*tenant),
            }
        }
        let default = config.defaults.tenant.as_deref();
        let default = default.and_then(|name| tenants.get(name)).cloned();
        let asks = !config.auth.is_empty();
        Ok(Self { asks, keys, issuers, certificate, tenants, default, counting, clock, salt_key })
    }

    /// Creates the series of all tenants.
    pub fn declare(&self, metrics: &Metrics) {
        self.tenants().for_each(|tenant| metrics.declare(&Scope::Tenant(&tenant.label)));
    }

    /// Removes the series of issuers that are not configured: those of an earlier configuration, and
    /// of one that was refused.
    pub fn forget_other_issuers(&self, metrics: &Metrics) {
        metrics.forget_issuers(|name| self.issuers.iter().any(|known| known.issuer.name() == name));
    }

    /// The name of an issuer whose keys were never read, if clients can only have tokens of such
    /// issuers: then each request is refused.
    pub fn unread_issuer(&self) -> Option<&str> {
        let has_others = !self.asks
            || !self.keys.is_empty()
            || self.certificate.is_some()
            || self.default.is_some()
            || self.issuers.iter().any(|trusted| trusted.issuer.has_keys());
        let first = self.issuers.first().filter(|_| !has_others);
        first.map(|trusted| trusted.issuer.name())
    }

    /// Whether tenants have the salts that they had before. Otherwise none finds what it has cached.
    pub fn salts_as(&self, before: &Self) -> bool {
        self.salt_key.derives_as(&before.salt_key)
    }

    /// All tenants.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<Tenant>> {
        // A tenant has a place for each of its identities as well.
        let named = self.tenants.iter().filter(|(name, tenant)| ***name == *tenant.name);
        named.map(|(_, tenant)| tenant)
    }

    /// Puts the limits of the configuration into effect, once it is served.
    pub fn apply_limits(&self) {
        self.tenants.values().for_each(|tenant| tenant.apply_limits(&self.counting));
        #[cfg(feature = "nats")]
        if let LimitCounting::Shared(replicas) = &self.counting {
            // The name may be an identity of another tenant.
            replicas.retain(|name| self.tenant(name).is_some_and(|tenant| &*tenant.name == name));
        }
    }

    /// Shares limits with other routers, if the configuration asks for it. Never ends; to be run by
    /// one task, which serves later configurations too. The task does not keep this value, and with
    /// it the tasks of issuers, beyond a reload.
    pub fn share_limits(&self) -> impl Future<Output = ()> + Send + use<> {
        let counting = self.counting.clone();
        async move {
            match counting {
                LimitCounting::Local(_) => std::future::pending().await,
                #[cfg(feature = "nats")]
                LimitCounting::Shared(replicas) => replicas.run().await,
            }
        }
    }

    /// Gives this router's shares of limits to other routers, once no request comes any more and the
    /// task of [`share_limits`](Self::share_limits) has ended. Ends after 2 s at the latest.
    pub async fn give_shares_back(&self) {
        match &self.counting {
            LimitCounting::Local(_) => {}
            #[cfg(feature = "nats")]
            LimitCounting::Shared(replicas) => replicas.leave().await,
        }
    }

    /// The tenant with this name or identity.
    pub fn tenant(&self, name: &str) -> Option<&Arc<Tenant>> {
        self.tenants.get(name)
    }

    /// The name of the tenant of requests without a credential, if there is one.
    pub fn default_tenant(&self) -> Option<&str> {
        self.default.as_ref().map(|tenant| &*tenant.name)
    }

    /// The tenant of a request to a model; `None` if the router has no tenants.
    ///
    /// # Errors
    /// The request has no valid credential, and needs one.
    pub fn client(
        &self,
        headers: &HeaderMap,
        certificate: Option<CertificateNames<'_>>,
        now: SystemTime,
    ) -> Result<Option<Arc<Tenant>>, Refusal> {
        if !self.asks {
            return Ok(self.default.clone());
        }
        if let Some(credential) = credential::of(headers) {
            let tenant = |trusted: &TrustedIssuer, claims: Claims| {
                let tenant = self.named(&claims.tenant)?;
                trusted.may_name(&tenant).then_some(tenant).ok_or(Refusal::NoTenant)
            };
            if let Some(tenant) = self.by_token(credential, now, tenant) {
                return tenant.map(Some);
            }
            return match self.key(credential, now)?.grant {
                Grant::Tenant(name) => self.named(&name).map(Some),
                Grant::Role(_) => Err(Refusal::WrongUse),
            };
        }
        if let Some(names) = certificate.and_then(|names| self.names_of(names)) {
            let known = names.iter().find_map(|name| self.tenants.get(name));
            return known.cloned().map(Some).ok_or(Refusal::NoTenant);
        }
        self.default.clone().map(Some).ok_or(Refusal::Missing)
    }

    /// The sender of a request to the admin listener; `None` if it has no credential.
    ///
    /// # Errors
    /// The credential is not valid, or is not for the admin listener.
    pub fn operator(
        &self,
        headers: &HeaderMap,
        now: SystemTime,
    ) -> Result<Option<Operator>, Refusal> {
        let Some(credential) = credential::of(headers).filter(|_| self.asks) else {
            return Ok(None);
        };
        let operator = |_: &TrustedIssuer, claims: Claims| {
            let role = claims.role.ok_or(Refusal::WrongUse)?;
            Ok(Operator { role, key: claims.tenant.as_str().into() })
        };
        if let Some(operator) = self.by_token(credential, now, operator) {
            return operator.map(Some);
        }
        let KeyHolder { id, grant } = self.key(credential, now)?;
        match grant {
            Grant::Role(role) => Ok(Some(Operator { role, key: id })),
            Grant::Tenant(_) => Err(Refusal::WrongUse),
        }
    }

    /// Whom a JSON Web Token names, as `sender` reads its claims; `None` if the credential is none,
    /// or if no tokens are accepted.
    fn by_token<T>(
        &self,
        credential: &str,
        now: SystemTime,
        sender: impl Fn(&TrustedIssuer, Claims) -> Result<T, Refusal>,
    ) -> Option<Result<T, Refusal>> {
        if self.issuers.is_empty() || !credential::is_token(credential) {
            return None;
        }
        let now_unix_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut results = self.issuers.iter().filter_map(|trusted| {
            let claims = trusted.issuer.claims(credential, now_unix_s)?;
            Some(claims.and_then(|claims| sender(trusted, claims)))
        });
        let first = results.next().unwrap_or(Err(Refusal::Unknown));
        // One issuer may be configured several times, for example for several audiences.
        Some(first.or_else(|refusal| results.find_map(Result::ok).ok_or(refusal)))
    }

    /// The tasks that keep the keys of issuers of tokens current, as far as they have not been taken
    /// before. Each ends after a reload by which its issuer is gone.
    pub fn take_tasks(&self) -> Vec<impl Future<Output = ()> + Send + use<>> {
        self.issuers.iter().filter_map(|trusted| trusted.issuer.take_task()).collect()
    }

    /// The files of keys that cannot be used: their previous keys stay valid.
    pub fn unusable_key_files(&self, now: Instant) -> Vec<String> {
        let unusable = self.keys.iter().filter(|source| !source.is_current(now));
        unusable.map(|source| source.file().to_string_lossy().into_owned()).collect()
    }

    /// The keys that have expired at this time, sorted by id.
    pub fn expired_keys(&self, at: SystemTime) -> Vec<KeyHolder> {
        let mut all: Vec<_> = self.keys.iter().flat_map(|source| source.expired(at)).collect();
        all.sort_by(|one, other| one.id.cmp(&other.id));
        all
    }

    /// The expired keys with which requests have come since this time, sorted by id.
    pub fn expired_keys_used_after(&self, since: SystemTime) -> Vec<KeyHolder> {
        let mut all: Vec<_> =
            self.keys.iter().flat_map(|source| source.expired_and_used(since)).collect();
        all.sort_by(|one, other| one.id.cmp(&other.id));
        all
    }

    /// Whether the broker over which limits are shared is connected; `None` if there is no broker.
    pub fn is_broker_connected(&self) -> Option<bool> {
        match &self.counting {
            LimitCounting::Local(_) => None,
            #[cfg(feature = "nats")]
            LimitCounting::Shared(replicas) => Some(replicas.is_connected()),
        }
    }

    /// Sets the gauges of the files of keys.
    pub fn observe_key_files(&self, metrics: &Metrics) {
        // A reload may have removed files.
        metrics.key_file_current.reset();
        for source in &self.keys {
            let file = source.file().to_string_lossy();
            let gauge = metrics.key_file_current.with_label_values(&[file.as_ref()]);
            gauge.set(source.is_current(Instant::now()).into());
        }
    }

    /// Sets the gauge of the connection to the broker, if limits are shared.
    pub fn observe_broker(&self, metrics: &Metrics) {
        if let Some(is_connected) = self.is_broker_connected() {
            metrics.broker_connected.with_label_values::<&str>(&[]).set(is_connected.into());
        }
    }

    /// Reads of the files of keys that are not being read, one for each: one that does not return
    /// keeps no other from being read.
    pub fn due_reads(&self, now: Instant) -> Vec<impl FnOnce() + Send + use<>> {
        self.keys.iter().filter_map(|source| source.due_read(now)).collect()
    }

    /// The holder of a key. Every file is searched, so that the time does not tell which one has the
    /// key.
    fn key(&self, credential: &str, now: SystemTime) -> Result<KeyHolder, Refusal> {
        let mut found = Err(Refusal::Unknown);
        for source in &self.keys {
            match source.holder(credential, now) {
                Err(Refusal::Unknown) => {}
                result => found = result,
            }
        }
        found
    }

    /// The names of a certificate that may name a tenant; `None` if certificates are no credential.
    fn names_of<'a>(&self, names: CertificateNames<'a>) -> Option<&'a [Box<str>]> {
        Some(match self.certificate? {
            CertificateName::SanUri => names.uris,
            CertificateName::SanDns => names.dns_names,
        })
    }

    fn named(&self, name: &str) -> Result<Arc<Tenant>, Refusal> {
        self.tenants.get(name).cloned().ok_or(Refusal::NoTenant)
    }
}

#[cfg(all(test, feature = "nats"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(tenants: &[&str]) -> Config {
        let tenants = tenants.join(" }, { limits: { requests_per_minute: 5 }, name: ");
        let yaml = format!(
            "
tenants: [ {{ limits: {{ requests_per_minute: 5 }}, name: {tenants} }} ]
quotas: {{ kind: nats, servers: [\"nats://127.0.0.1:1\"] }}
models:
  - name: m
    tokenizer: {{ kind: none }}
    flow: aggregated
    workers: [ {{ id: w, role: both, url: \"http://127.0.0.1:1\" }} ]
"
        );
        let loaded = splitrail_config::parse("splitrail.yaml", &yaml, std::path::Path::new("."));
        loaded.map_err(|problems| problems.to_string()).unwrap().config
    }

    #[test]
    fn a_refused_configuration_leaves_no_share_to_its_tenants() {
        let metrics = Metrics::new().unwrap();
        let running = Access::new(&config(&["acme"]), &metrics, None).unwrap();
        let refused = Access::new(&config(&["acme", "new"]), &metrics, Some(&running)).unwrap();
        drop(refused);
        running.apply_limits();
        let LimitCounting::Shared(replicas) = &running.counting else { panic!("not shared") };
        assert_eq!(replicas.names(), ["acme"]);
    }
}
