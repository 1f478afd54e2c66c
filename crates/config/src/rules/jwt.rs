//! Rules about JSON Web Tokens: the keys of their issuer can be read.

use std::path::Path;

use crate::jwks::{JwksUrl, KeySet, read_file};
use crate::model::{Auth, JwtAuth};
use crate::tls::authorities;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};
use splitrail_settings::words::shown;

/// Reports every violation of a rule by an item of `auth`, if its kind is `jwt`. `path` is the path
/// of the item, such as `auth[0]`.
pub(super) fn check(node: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let Ok(Auth::Jwt(auth)) = serde_json::from_value::<Auth>(node.to_json()) else { return };
    match auth.jwks_file() {
        Some(file) => {
            key_file(file, node, path, base_dir, report);
            for key in ["jwks_ca", "refresh_interval"] {
                unused(node, path, key, report);
            }
        }
        None => url(&auth, node, path, base_dir, report),
    }
}

/// Warns of an issuer that can name the tenants of another one. `auth` are all items of `auth`.
pub(super) fn check_issuers(auth: &[Node], report: &mut ProblemReport) {
    let issuer = |node: &Node| match serde_json::from_value::<Auth>(node.to_json()) {
        Ok(Auth::Jwt(auth)) => Some(auth),
        _ => None,
    };
    let issuers: Vec<(usize, JwtAuth)> =
        auth.iter().enumerate().filter_map(|(index, node)| Some((index, issuer(node)?))).collect();
    for (index, of) in issuers.iter().filter(|(_, of)| of.tenants.is_none()) {
        if issuers.iter().any(|(_, other)| other.issuer != of.issuer) {
            let message = format!(
                "`auth[{index}]`: its issuer can name the tenants of the other issuers as well"
            );
            let hint = "list the tenants that its tokens may name: `tenants: [NAME]`";
            report.warn(auth[*index].at, message, hint);
        }
    }
}

fn key_file(file: &Path, node: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let at = node.get("jwks").unwrap_or(node).at;
    let named = shown(&file.display().to_string());
    let text = match read_file(&base_dir.join(file)) {
        Ok(text) => text,
        Err(error) => {
            let message = format!("`{path}.jwks` \"{named}\" cannot be read: {error}");
            let hint = "a file with the issuer's JSON Web Key Set, or its `https://` URL; \
                        relative paths start at the configuration's folder";
            report.error(at, message, hint);
            return;
        }
    };
    match KeySet::parse(&text) {
        Err(error) => {
            let message = format!("`{path}.jwks` \"{named}\" cannot be used: {error}");
            let hint = "store what the issuer's `jwks_uri` returns: `{ \"keys\": [...] }`";
            report.error(at, message, hint);
        }
        Ok(set) if set.has_secrets => {
            let message = format!("`{path}.jwks` \"{named}\" contains a private key");
            let hint = "whoever reads the file can make tokens: publish the public keys only";
            report.warn(at, message, hint);
        }
        Ok(_) => {}
    }
}

fn url(auth: &JwtAuth, node: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let at = |key: &str| node.get(key).unwrap_or(node).at;
    match JwksUrl::parse(&auth.jwks) {
        Err(error) => {
            let hint = "write `https://HOST/PATH`; `http://` is for this machine only";
            report.error(at("jwks"), format!("`{path}.jwks` {error}"), hint);
        }
        Ok(url) if !url.is_tls => unused(node, path, "jwks_ca", report),
        Ok(_) => {
            let ca = auth.jwks_ca.as_deref();
            let read = ca.map(|ca| authorities("jwks_ca", &base_dir.join(ca)));
            if let Some(Err(error)) = read {
                let message = format!("`{path}.jwks_ca` {}", error.why);
                let hint = "a PEM file with the certificate of the authority; \
                            relative paths start at the configuration's folder";
                report.error(at("jwks_ca"), message, hint);
            }
        }
    }
}

/// Warns of a key that has no effect with these `jwks`.
fn unused(node: &Node, path: &str, key: &str, report: &mut ProblemReport) {
    let given = node.get(key).filter(|node| node.value != Value::Null);
    if let Some(given) = given {
        let message = format!("`{path}.{key}` does nothing with this `jwks`");
        report.warn(given.at, message, "it is for `https://` URLs: leave it out");
    }
}
