//! Rules about TLS on the listeners for clients and operators.

use std::path::Path;
use std::time::SystemTime;

use crate::model::{ClientCertificates, ListenerTls};
use crate::tls::{Protocols, ServerTerms, TlsFileError, TlsFiles, TlsPaths};
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

/// Reports every violation of a rule about `listen.http.tls`, `listen.grpc.tls`, `listen.admin.tls`
/// and `listen.metrics.tls`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(listen) = root.get("listen") else { return };
    for key in ["http", "grpc", "admin", "metrics"] {
        if let Some(listener) = listen.get(key) {
            Section { path: format!("listen.{key}.tls"), listener, base_dir }.check(report);
        }
    }
}

/// The `tls` of one listener.
struct Section<'n> {
    path: String,
    listener: &'n Node,
    base_dir: &'n Path,
}

impl Section<'_> {
    fn check(&self, report: &mut ProblemReport) {
        let Some(node) = self.listener.get("tls").filter(|node| node.value != Value::Null) else {
            return;
        };
        let Some(tls) = typed::<ListenerTls>(self.listener, "tls") else { return };
        let at = |key: &str| node.get(key).unwrap_or(node).at;
        let path = &self.path;
        if tls.client_certificates.is_some() && tls.client_ca.is_none() {
            let message = format!("`{path}.client_certificates` needs an authority");
            report.error(at("client_certificates"), message, format!("add `{path}.client_ca`"));
        }
        if tls.plain_text {
            let message = format!(
                "`{path}.plain_text` also accepts connections without TLS: credentials may travel \
                 in clear text"
            );
            let hint = "delete it when all clients use `https`";
            report.warn(at("plain_text"), message, hint);
        }
        match self.files(&tls) {
            Err(error) => {
                let hint = "a PEM file; relative paths start at the configuration's folder";
                report.error(at(error.key), format!("`{path}.{}` {}", error.key, error.why), hint);
            }
            Ok(files) if has_expired(&files) => {
                let message = format!("`{path}.cert` has expired");
                report.warn(at("cert"), message, "clients refuse it: renew the certificate");
            }
            Ok(_) => {}
        }
    }

    fn files(&self, tls: &ListenerTls) -> Result<TlsFiles, TlsFileError> {
        let mut paths = TlsPaths::from(tls);
        for path in [&mut paths.cert, &mut paths.key].into_iter().chain(&mut paths.client_ca) {
            *path = self.base_dir.join(&*path);
        }
        let files = TlsFiles::read(&paths)?;
        let terms = ServerTerms {
            protocols: Protocols::Http,
            client_certificates: ClientCertificates::Required,
        };
        files.server_config(terms)?;
        Ok(files)
    }
}

fn has_expired(files: &TlsFiles) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    files.expires_unix_s().is_some_and(|end| end < now.as_secs() as i64)
}
