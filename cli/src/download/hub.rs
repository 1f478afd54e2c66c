//! The protocol of the Hugging Face hub, as `huggingface_hub` 1.0 and later speak it: the files of a
//! revision are listed at `/api/models/ID/revision/REVISION`, and a file is at
//! `/ID/resolve/COMMIT/FILE`. Small files are redirected within the hub, large ones to another server.

use http::{HeaderMap, StatusCode};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde::Deserialize;
use splitrail_config::model::EngineTls;
use splitrail_settings::command::exit;

use super::download_error::DownloadError;
use super::environment::Environment;
use super::fetch::{FetchReply, Fetcher};
use super::files::WantedFile;
use crate::admin::client_tls;

/// The revision that is fetched: the one that the cache is asked for.
pub(super) const REVISION: &str = "main";
/// Maximum size of a list of files in bytes.
const LISTING_MAX_BYTES: usize = 16 << 20;
/// Maximum length of the name of a blob.
const BLOB_MAX_CHARS: usize = 128;

/// A hub.
pub(super) struct Hub(Fetcher);

/// The files of a revision.
pub(super) struct Listing {
    /// The commit that the revision names.
    pub(super) commit: String,
    /// The paths of its files.
    pub(super) files: Vec<String>,
}

impl Listing {
    pub(super) fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file == name)
    }
}

/// A file whose content has not been read.
pub(super) struct FileDescription {
    /// The name under which the cache keeps the content: the entity tag. It is the SHA-256 of a large
    /// file, and Git's SHA-1 of a small one.
    pub(super) blob: String,
    file: WantedFile,
    reply: FetchReply,
}

/// Replies of `/api/models/ID/revision/REVISION`.
#[derive(Deserialize)]
struct Revision {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    pub(super) fn new(environment: Environment) -> Result<Self, DownloadError> {
        let Environment { endpoint, authorization } = environment;
        // Also for `http`, which may redirect to `https`.
        let tls = client_tls(&EngineTls::default(), |_| "--download");
        let tls = tls.map_err(|failure| DownloadError::unavailable(failure.message))?;
        Ok(Self(Fetcher { tls: Some(tls), endpoint, authorization }))
    }

    /// Lists the files of a model's main revision.
    ///
    /// # Errors
    /// The hub cannot be reached, or has no such model for who asks.
    pub(super) async fn listing(&self, id: &str) -> Result<Listing, DownloadError> {
        let place = self.0.endpoint.below(&format!("api/models/{id}/revision/{REVISION}"));
        let shown = place.shown();
        let reply = self.0.get(place).await?;
        if reply.status != StatusCode::OK {
            return Err(self.refused(id, &reply));
        }
        let body = reply.read(LISTING_MAX_BYTES).await?;
        let foreign = || DownloadError::unavailable(format!("{shown} is not that of a hub"));
        let revision: Revision = serde_json::from_slice(&body).map_err(|_| foreign())?;
        if !is_hexadecimal(&revision.sha, 40) {
            return Err(foreign());
        }
        let files = revision.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Listing { commit: revision.sha, files })
    }

    /// Asks for a file of a commit.
    ///
    /// # Errors
    /// As for [`Self::listing`]; or the hub does not say which content the file has.
    pub(super) async fn open(
        &self,
        id: &str,
        commit: &str,
        file: WantedFile,
    ) -> Result<FileDescription, DownloadError> {
        let place = self.0.endpoint.below(&format!("{id}/resolve/{commit}/{}", file.name));
        let shown = place.shown();
        let reply = self.0.get(place).await?;
        if reply.status != StatusCode::OK {
            return Err(self.refused(id, &reply));
        }
        let blob = entity_tag(&reply.about).ok_or_else(|| {
            DownloadError::unavailable(format!(
                "{shown} has no entity tag: it is not that of a hub"
            ))
        })?;
        Ok(FileDescription { blob, file, reply })
    }

    /// What a reply without success means (`x-error-code` is that of the hub).
    fn refused(&self, id: &str, reply: &FetchReply) -> DownloadError {
        let code = reply.about.get("x-error-code").and_then(|code| code.to_str().ok());
        let page = self.0.endpoint.below(id).shown();
        let has_token = self.0.authorization.is_some();
        let denied = |why: &str, hint: String| DownloadError {
            code: exit::NO_PERMISSION,
            why: why.to_owned(),
            hint,
        };
        match (reply.status.as_u16(), code) {
            (status, _) if !reply.is_of_hub => {
                let why = format!("{} replied with status {status}", reply.host());
                DownloadError::unavailable(why)
            }
            (401 | 403, Some("GatedRepo")) if has_token => denied(
                "the model is gated, and the account of HF_TOKEN has no access",
                format!("accept the model's terms at {page} with the account of HF_TOKEN"),
            ),
            (401 | 403, Some("GatedRepo")) => denied(
                "the model is gated, and HF_TOKEN is not set",
                format!(
                    "accept the model's terms at {page}, and set HF_TOKEN to a token of that account"
                ),
            ),
            // The hub does not tell strangers whether a model exists.
            (401, Some("RepoNotFound") | None) | (404, Some("RepoNotFound")) if !has_token => {
                denied(
                    "the hub has no such public model",
                    "check the id; a private model needs HF_TOKEN".to_owned(),
                )
            }
            (401, _) => denied(
                "the hub refuses HF_TOKEN",
                "set HF_TOKEN to a valid token, or unset it for public models".to_owned(),
            ),
            (403, _) => {
                denied("the account of HF_TOKEN may not read the model", format!("look at {page}"))
            }
            (404, Some("RevisionNotFound")) => DownloadError::config(
                format!("the model has no revision `{REVISION}`"),
                format!("look at {page}"),
            ),
            (404, _) => DownloadError::config(
                "the hub has no such model",
                format!("check the id: {page} should be its page"),
            ),
            (429, _) => DownloadError::unavailable("the hub limits requests for a while"),
            (status, _) => {
                DownloadError::unavailable(format!("the hub replied with status {status}"))
            }
        }
    }
}

impl FileDescription {
    /// Reads the content, and compares it with its name.
    ///
    /// # Errors
    /// The content is incomplete, too large, or not what the hub has announced.
    pub(super) async fn read(self) -> Result<Vec<u8>, DownloadError> {
        let content = self.reply.read(self.file.max_bytes).await?;
        match is_content_of(&self.blob, &content) {
            true => Ok(content),
            false => {
                let why = format!("{} is not what the hub has announced", self.file.name);
                Err(DownloadError::unavailable(why))
            }
        }
    }
}

/// The entity tag of the file, as a name for the cache.
fn entity_tag(headers: &HeaderMap) -> Option<String> {
    let tag = headers.get("x-linked-etag").or_else(|| headers.get(http::header::ETAG))?;
    let tag = tag.to_str().ok()?;
    let tag = tag.strip_prefix("W/").unwrap_or(tag).trim_matches('"');
    let is_name = (1..=BLOB_MAX_CHARS).contains(&tag.len())
        && !tag.starts_with('.')
        && tag.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    is_name.then(|| tag.to_owned())
}

/// Whether content has the name of a blob. Names that are no digests, of mirrors, prove nothing.
fn is_content_of(blob: &str, content: &[u8]) -> bool {
    let mut digest = match blob {
        _ if is_hexadecimal(blob, 64) => Context::new(&SHA256),
        _ if is_hexadecimal(blob, 40) => {
            // The form in which Git names files.
            let mut digest = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            digest.update(format!("blob {}\0", content.len()).as_bytes());
            digest
        }
        _ => return true,
    };
    digest.update(content);
    let hexadecimal: String =
        digest.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    hexadecimal == blob.to_ascii_lowercase()
}

fn is_hexadecimal(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn content_is_compared_with_the_digest_that_names_it() {
        // `printf hello | git hash-object --stdin`, `printf hello | sha256sum`.
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        for name in [git, sha256, &sha256.to_uppercase(), "tag-of-a-mirror"] {
            assert!(is_content_of(name, b"hello"), "{name}");
        }
        for name in [git, sha256] {
            assert!(!is_content_of(name, b"hellp"), "{name}");
        }
    }

    #[test]
    fn an_entity_tag_names_no_other_place() {
        let tag = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("etag", text.parse().unwrap());
            entity_tag(&headers)
        };
        assert_eq!(tag("\"abc\""), Some("abc".to_owned()));
        assert_eq!(tag("W/\"abc\""), Some("abc".to_owned()));
        for text in ["", "\"\"", "\"../x\"", "\"a/b\"", "\"..\"", &"a".repeat(200)] {
            assert_eq!(tag(text), None, "{text}");
        }
        let mut headers = HeaderMap::new();
        headers.insert("etag", "\"of-the-redirect\"".parse().unwrap());
        headers.insert("x-linked-etag", "\"of-the-file\"".parse().unwrap());
        assert_eq!(entity_tag(&headers), Some("of-the-file".to_owned()));
    }
}
