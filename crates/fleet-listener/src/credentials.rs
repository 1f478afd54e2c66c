//! The workers that a caller may attach, according to its token and its certificate.

use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

/// The workers that a token is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Workers {
    /// All workers.
    Any,
    /// The workers whose ids are in the list, or begin with the text before the `*` of an entry
    /// that ends in `*`.
    Listed(Arc<[String]>),
}

impl Workers {
    fn include(&self, id: &str) -> bool {
        let Self::Listed(listed) = self else { return true };
        listed.iter().any(|entry| match entry.strip_suffix('*') {
            Some(beginning) => id.starts_with(beginning),
            None => entry == id,
        })
    }
}

/// The workers that a configured entry with a token is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenScope {
    pub(super) workers: Workers,
    /// The configured names of their models; `None` for every model.
    pub(super) models: Option<Arc<[String]>>,
}

impl TokenScope {
    fn includes(&self, model: &str, id: &str) -> bool {
        let of_model = |models: &Arc<[String]>| models.iter().any(|listed| listed == model);
        self.workers.include(id) && self.models.as_ref().is_none_or(of_model)
    }
}

/// The workers that a client may attach: those that all of its credentials allow.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowedWorkers {
    /// The workers of each configured entry with the client's token; empty if no token is required.
    by_token: Vec<TokenScope>,
    by_certificate: Option<Option<CertificateDer<'static>>>,
}

impl AllowedWorkers {
    /// Limits the workers to those of the client's token. Each item is one configured entry with
    /// this token; one that includes the worker is enough.
    pub(super) fn bind_to_token(&mut self, scopes: Vec<TokenScope>) {
        self.by_token = scopes;
    }

    /// Limits the workers to those that the certificate names; `None` (no certificate) allows no
    /// worker.
    pub(super) fn bind_to_certificate(&mut self, certificate: Option<CertificateDer<'static>>) {
        self.by_certificate = Some(certificate);
    }

    /// Whether the client may attach the worker with this id of the model with this configured name.
    pub(super) fn permits(&self, model: &str, id: &str) -> bool {
        let includes = |scope: &TokenScope| scope.includes(model, id);
        let token = self.by_token.is_empty() || self.by_token.iter().any(includes);
        let named = |certificate: &Option<_>| certificate.as_ref().is_some_and(|c| names(c, id));
        token && self.by_certificate.as_ref().is_none_or(named)
    }
}

/// Whether the worker's id is among the DNS names of a certificate.
fn names(certificate: &CertificateDer<'static>, id: &str) -> bool {
    let Ok(ServerName::DnsName(name)) = ServerName::try_from(id) else { return false };
    let parsed = ParsedCertificate::try_from(certificate);
    parsed.is_ok_and(|parsed| verify_server_name(&parsed, &ServerName::DnsName(name)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_worker_id_or_a_prefix_with_a_star() {
        let listed = |entries: &[&str]| {
            let entries = entries.iter().map(|entry| (*entry).to_owned());
            let mut allowed = AllowedWorkers::default();
            let workers = Workers::Listed(entries.collect());
            allowed.bind_to_token(vec![TokenScope { workers, models: None }]);
            allowed
        };
        let prefill = listed(&["p-*", "d0"]);
        for (id, permitted) in [
            ("p-0", true),
            ("p-", true),
            ("d0", true),
            ("d00", false),
            ("p", false),
            ("xp-0", false),
        ] {
            assert_eq!(prefill.permits("m", id), permitted, "{id}");
        }
        assert!(listed(&["*"]).permits("m", "x") && !listed(&[]).permits("m", "x"));
        assert!(AllowedWorkers::default().permits("m", "x"));
    }

    #[test]
    fn an_entry_with_models_is_for_their_workers_only() {
        let scope = |workers, models: &[&str]| TokenScope {
            workers,
            models: Some(models.iter().map(|model| (*model).to_owned()).collect()),
        };
        let mut allowed = AllowedWorkers::default();
        let of_b = Workers::Listed(["d-b".to_owned()].into());
        allowed.bind_to_token(vec![scope(Workers::Any, &["a"]), scope(of_b, &["b"])]);
        assert!(allowed.permits("a", "d-0") && allowed.permits("b", "d-b"));
        assert!(!allowed.permits("b", "d-0") && !allowed.permits("c", "d-b"));
    }

    #[test]
    fn without_a_certificate_no_worker_is_permitted_if_certificates_name_workers() {
        let mut allowed = AllowedWorkers::default();
        allowed.bind_to_certificate(None);
        assert!(!allowed.permits("m", "p0"));
    }
}
