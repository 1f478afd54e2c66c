//! The address of the hub and the token for it, from the variables of `huggingface_hub`.

use http::HeaderValue;

use super::download_error::DownloadError;
use super::location::Location;

/// The public hub.
const ENDPOINT: &str = "https://huggingface.co";

/// What the environment says about the hub.
pub(super) struct Environment {
    /// `HF_ENDPOINT`, or the public hub.
    pub(super) endpoint: Location,
    /// The value of `authorization` for the token in `HF_TOKEN`.
    pub(super) authorization: Option<HeaderValue>,
}

impl Environment {
    /// The environment of this process.
    ///
    /// # Errors
    /// The environment forbids downloads, or a value cannot be used.
    pub(super) fn of_process() -> Result<Self, DownloadError> {
        Self::of(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, DownloadError> {
        for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            let is_true = |value: String| {
                ["1", "ON", "YES", "TRUE"].contains(&&*value.trim().to_ascii_uppercase())
            };
            if variable(name).is_some_and(is_true) {
                let hint = format!("unset {name}, or leave `--download` out");
                return Err(DownloadError::config(format!("{name} forbids it"), hint));
            }
        }
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = Location::parse(endpoint.trim().trim_end_matches('/')).ok_or_else(|| {
            let hint = "write https://HOST, perhaps with a port and a path; no user, no query";
            DownloadError::config("HF_ENDPOINT is not the URL of a hub", hint)
        })?;
        let authorization = variable("HF_TOKEN").map(|token| bearer(&token)).transpose()?;
        if authorization.is_some() && !endpoint.is_private() {
            let hint = "use https, or unset HF_TOKEN";
            let why = "HF_ENDPOINT uses http, and anyone between could read HF_TOKEN";
            return Err(DownloadError::config(why, hint));
        }
        Ok(Self { endpoint, authorization })
    }
}

fn bearer(token: &str) -> Result<HeaderValue, DownloadError> {
    let value = HeaderValue::from_str(&format!("Bearer {}", token.trim()));
    let mut value = value.map_err(|_| {
        DownloadError::config("HF_TOKEN is not a token", "it has characters that no token has")
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Environment, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Environment::of(variable).map_err(|error| error.why)
    }

    #[test]
    fn the_public_hub_is_asked_without_a_token_by_default() {
        let environment = of(&[]).unwrap();
        assert_eq!(environment.endpoint.shown(), "https://huggingface.co");
        assert!(environment.authorization.is_none());
        let mirror = of(&[("HF_ENDPOINT", "https://mirror.example:8443/hf/")]).unwrap();
        assert_eq!(mirror.endpoint.shown(), "https://mirror.example:8443/hf");
    }

    #[test]
    fn a_token_is_not_sent_in_the_clear_or_shown() {
        let token = ("HF_TOKEN", " hf_s3cret\n");
        let sent = of(&[token]).unwrap().authorization.unwrap();
        assert_eq!(sent.to_str().unwrap(), "Bearer hf_s3cret");
        assert!(!format!("{sent:?}").contains("s3cret"));
        let why = of(&[token, ("HF_ENDPOINT", "http://mirror.example")]).err().unwrap();
        assert!(why.contains("HF_TOKEN") && !why.contains("s3cret"), "{why}");
        for endpoint in ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:1"] {
            assert!(of(&[token, ("HF_ENDPOINT", endpoint)]).is_ok(), "{endpoint}");
        }
        assert!(of(&[("HF_ENDPOINT", "http://mirror.example")]).is_ok());
        assert!(of(&[("HF_TOKEN", "hf_\u{7f}")]).is_err());
    }

    #[test]
    fn offline_means_that_nothing_is_fetched() {
        for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            assert!(of(&[(name, "1")]).err().unwrap().contains(name));
            assert!(of(&[(name, "true")]).is_err());
            assert!(of(&[(name, "0")]).is_ok());
        }
    }

    #[test]
    fn an_endpoint_is_a_url() {
        for endpoint in ["huggingface.co", "ftp://h", "https://u:p@h", "https://", "https://h?x"] {
            let why = of(&[("HF_ENDPOINT", endpoint)]).err().unwrap();
            assert!(why.contains("HF_ENDPOINT") && !why.contains("u:p"), "{why}");
        }
    }
}
