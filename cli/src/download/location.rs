//! URLs of files, and where redirects lead.

use std::net::IpAddr;

use http::Uri;

use crate::admin::AdminAddress;

/// An absolute URL with `http` or `https`, without a user and without a fragment.
#[derive(Clone, Debug)]
pub(super) struct Location {
    /// Scheme, host and port.
    pub(super) address: AdminAddress,
    /// Host and port as the header `host` has them: without the port of the scheme, because signed
    /// URLs are signed for that.
    pub(super) host: String,
    /// Path and query.
    pub(super) target: String,
}

impl Location {
    /// Reads an endpoint: a URL without a query, to whose path others are appended.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let location = Self::absolute(text)?;
        (!location.target.contains('?') && !text.contains('#')).then_some(location)
    }

    /// The URL of a path below this one.
    pub(super) fn below(&self, path: &str) -> Self {
        let base = self.target.trim_end_matches('/');
        Self { target: format!("{base}/{path}"), ..self.clone() }
    }

    /// Where a redirect from here leads: an absolute URL, or a path of the same server (RFC 9110,
    /// section 10.2.2). `None` if it is neither, or if it leads from `https` to `http`.
    pub(super) fn redirected(&self, location: &str) -> Option<Self> {
        let location = location.split('#').next().unwrap_or_default();
        let to = match location {
            _ if location.contains("://") => Self::absolute(location)?,
            _ if location.starts_with('/') && !location.starts_with("//") => {
                let target: Uri = location.parse().ok()?;
                let target = target.path_and_query()?.as_str().to_owned();
                Self { target, ..self.clone() }
            }
            _ => return None,
        };
        (to.address.is_tls() || !self.address.is_tls()).then_some(to)
    }

    /// Whether both are of one server.
    pub(super) fn is_same_server(&self, other: &Self) -> bool {
        self.address == other.address
    }

    /// Whether what is sent there cannot be read on the way: by TLS, or on loopback.
    pub(super) fn is_private(&self) -> bool {
        let host = self.address.host();
        let is_loopback = |ip: IpAddr| ip.is_loopback();
        self.address.is_tls() || host.parse().map_or(host == "localhost", is_loopback)
    }

    /// The URL for people; queries of redirects may contain signatures, and are left out.
    pub(super) fn shown(&self) -> String {
        let scheme = if self.address.is_tls() { "https" } else { "http" };
        let path = self.target.split('?').next().unwrap_or_default();
        format!("{scheme}://{}{}", self.host, path.trim_end_matches('/'))
    }

    fn absolute(text: &str) -> Option<Self> {
        let uri: Uri = text.parse().ok()?;
        let authority = uri.authority()?;
        let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https"))?;
        let usual = if scheme == "https" { 443 } else { 80 };
        let port = match authority.as_str().len() == authority.host().len() {
            true => usual,
            // Refuses users as well, because those are part of the authority.
            false => authority
                .as_str()
                .strip_prefix(authority.host())?
                .strip_prefix(':')?
                .parse()
                .ok()?,
        };
        let address =
            AdminAddress::parse(&format!("{scheme}://{}:{port}", authority.host())).ok()?;
        let host = match port == usual {
            true => authority.host().to_owned(),
            false => format!("{}:{port}", authority.host()),
        };
        let target = uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        Some(Self { address, host, target })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_appended_to_the_endpoint() {
        let endpoint = Location::parse("https://mirror.example/hf").unwrap();
        let file = endpoint.below("org/model/resolve/main/config.json");
        assert_eq!(file.shown(), "https://mirror.example/hf/org/model/resolve/main/config.json");
        let root = Location::parse("http://localhost:8080").unwrap();
        assert_eq!(root.below("api/models/x").target, "/api/models/x");
        assert_eq!((root.host.as_str(), root.address.port()), ("localhost:8080", 8080));
        assert_eq!(endpoint.host, "mirror.example");
    }

    #[test]
    fn redirects_stay_encrypted_and_carry_no_user() {
        let from = Location::parse("https://huggingface.co").unwrap().below("org/model");
        let to = |location: &str| from.redirected(location);
        let same = to("/api/resolve-cache/x?etag=%22a%22#top").unwrap();
        assert!(same.is_same_server(&from));
        assert_eq!(same.target, "/api/resolve-cache/x?etag=%22a%22");
        let other = to("https://cdn.example:443/x?Signature=s3cret").unwrap();
        assert!(!other.is_same_server(&from));
        assert_eq!((other.host.as_str(), other.address.port()), ("cdn.example", 443));
        assert_eq!(other.shown(), "https://cdn.example/x");
        for location in [
            "",
            "x",
            "//cdn.example/x",
            "http://cdn.example/x",
            "https://u:p@cdn.example/x",
            "ftp://x",
        ] {
            assert!(to(location).is_none(), "{location}");
        }
        let plain = Location::parse("http://localhost:1").unwrap();
        assert!(plain.redirected("http://localhost:2/x").is_some());
        assert!(plain.redirected("https://localhost:2/x").is_some());
    }
}
