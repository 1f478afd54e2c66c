//! Rules about TLS on the listeners for clients and operators.

use std::path::Path;
use std::time::SystemTime;

use crate::model::{ClientCertificates, ListenerTls};
use crate::tls::{Protocols, ServerTerms, TlsFiles, TlsPaths};
use crate::value::typed;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::{Node, Value};

/// Reports every violation of a rule about `listen.http.tls`, `listen.grpc.tls`, `listen.admin.tls`
/// and `listen.metrics.tls`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(listen) = root.get("listen") else { return };
    for key in ["http", "grpc", "admin", "metrics"] {
        let Some(listener) = listen.get(key) else { continue };
        let node = listener.get("tls").filter(|node| node.value != Value::Null);
        if let (Some(node), Some(tls)) = (node, typed::<ListenerTls>(listener, "tls")) {
            Section { path: &format!("listen.{key}.tls"), node, base_dir }.check(&tls, report);
        }
    }
}

/// A `tls` section of a listener.
pub(super) struct Section<'n> {
    pub(super) path: &'n str,
    pub(super) node: &'n Node,
    pub(super) base_dir: &'n Path,
}

impl Section<'_> {
    fn check(&self, tls: &ListenerTls, report: &mut ProblemReport) {
        let path = &self.path;
        if tls.client_certificates.is_some() && tls.client_ca.is_none() {
            let message = format!("`{path}.client_certificates` needs an authority");
            let hint = format!("add `{path}.client_ca`");
            report.error(self.at("client_certificates"), message, hint);
        }
        if tls.plain_text {
            let message = format!(
                "`{path}.plain_text` also accepts connections without TLS: credentials may travel \
                 in clear text"
            );
            let hint = "delete it when all clients use `https`";
            report.warn(self.at("plain_text"), message, hint);
        }
        if let Some(files) = self.files(TlsPaths::from(tls), Protocols::Http, report)
            && has_expired(&files)
        {
            let message = format!("`{path}.cert` has expired");
            report.warn(self.at("cert"), message, "clients refuse it: renew the certificate");
        }
    }

    /// Reads the files, and reports one that cannot be used.
    pub(super) fn files(
        &self,
        mut paths: TlsPaths,
        protocols: Protocols,
        report: &mut ProblemReport,
    ) -> Option<TlsFiles> {
        for path in [&mut paths.cert, &mut paths.key].into_iter().chain(&mut paths.client_ca) {
            *path = self.base_dir.join(&*path);
        }
        let terms = ServerTerms { protocols, client_certificates: ClientCertificates::Required };
        let read = TlsFiles::read(&paths).and_then(|files| {
            files.server_config(terms)?;
            Ok(files)
        });
        if let Err(error) = &read {
            let hint = "a PEM file; relative paths start at the configuration's folder";
            let message = format!("`{}.{}` {}", self.path, error.key, error.why);
            report.error(self.at(error.key), message, hint);
        }
        read.ok()
    }

    fn at(&self, key: &str) -> Place {
        self.node.get(key).unwrap_or(self.node).at
    }
}

fn has_expired(files: &TlsFiles) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    files.expires_unix_s().is_some_and(|end| end < now.as_secs() as i64)
}
