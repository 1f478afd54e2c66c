//! Forms (`multipart/form-data`, RFC 7578): the bodies of requests with a recording.
//!
//! A form is read strictly and written again for engines, with another boundary: no byte with which
//! a client frames its form reaches an engine, which could read it in another way. In between, the
//! texts of the form are the members of an object, like those of any other body.

use bytes::Bytes;
use http::HeaderValue;
use splitrail_engine::fields::{Rule, rule};

use super::json::{Builder, JsonObject};
use super::parts::Parts;
use super::text::random_id;
use crate::error::{Error, ErrorKind};

mod reader;

use reader::{Part, parameters, parts, wrong};

/// Maximum total length in bytes of the names and texts of a form, without its file.
const TEXTS_MAX_BYTES: usize = 64 << 10;

/// Maximum number of characters of a file's name that an engine is sent.
const FILE_NAME_MAX_CHARS: usize = 64;

/// Bytes of a recording per token of its model: 16,000 samples of 16 bits in a second, of which
/// Whisper makes 50 tokens.
const BYTES_PER_TOKEN: usize = 640;

/// Maximum number of members of an object of extensions.
const EXTENSIONS_MAX: usize = 256;

/// The name of the part with the recording.
const FILE: &str = "file";

/// What separates the parts of a form; RFC 2046, section 5.1.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boundary(Box<str>);

impl Boundary {
    /// The boundary in a content type; `None` if it is not that of a form with exactly one boundary.
    pub fn of_content_type(value: &[u8]) -> Option<Self> {
        let value = std::str::from_utf8(value).ok()?;
        let (kind, rest) = value.split_at(value.find(';')?);
        if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let (_, boundary) = parameters(rest)?.into_iter().find(|(name, _)| name == "boundary")?;
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(&byte);
        let is_good = (1..=70).contains(&boundary.len())
            && boundary.bytes().all(is_good)
            && !boundary.ends_with(' ');
        is_good.then(|| Self(boundary.into()))
    }

    /// A boundary of 128 random bits, which no form contains by chance or by intent.
    pub fn random() -> Self {
        Self(random_id().into())
    }
}

/// The recording of a form.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Letters, digits, `.`, `-` and `_`.
    file_name: String,
    bytes: Bytes,
    /// The boundary of the form for engines.
    boundary: Boundary,
}

/// Reads a form: its texts as an object, and its recording, with the boundary that it has for
/// engines. A text is a string; a field whose name ends with `[]` is a list of strings; an object of
/// the operator's own extensions, which engines read from a text, is an object.
///
/// # Errors
/// A 400 that names the part or the field at fault.
pub fn read(
    body: &Bytes,
    boundary: &Boundary,
    for_engines: Boundary,
) -> Result<(JsonObject, Recording), Error> {
    let mut fields: Vec<(String, Vec<&str>)> = Vec::new();
    let (mut file, mut bytes) = (None, 0);
    for (place, part) in (1..).zip(parts(body, &boundary.0)?) {
        let Part { name, file_name, content } = part;
        if let Some(file_name) = file_name {
            if name != FILE {
                return Err(wrong(place, "is a file; only the part `file` may be one"));
            }
            let file_name = plain_file_name(&file_name);
            let boundary = for_engines.clone();
            let recording = Recording { file_name, bytes: body.slice_ref(content), boundary };
            if file.replace(recording).is_some() {
                return Err(Error::invalid(FILE, "`file` is given twice"));
            }
            continue;
        }
        if name == FILE {
            return Err(Error::invalid(FILE, "`file` must be a file: its part needs a `filename`"));
        }
        let text = std::str::from_utf8(content).map_err(|_| wrong(place, "is not UTF-8"))?;
        if name == "cache_salt" {
            let message = "engines have no `cache_salt` for recordings";
            return Err(Error::invalid(name, message));
        }
        bytes += name.len() + text.len();
        if bytes > TEXTS_MAX_BYTES {
            let message = format!("the texts of the form have more than {TEXTS_MAX_BYTES} bytes");
            return Err(Error::new(ErrorKind::InvalidRequest, message));
        }
        match fields.iter_mut().find(|(other, _)| *other == name) {
            None => fields.push((name, vec![text])),
            Some((_, texts)) if name.ends_with("[]") => texts.push(text),
            Some(_) => return Err(wrong(place, "has a name that an earlier part has")),
        }
    }
    let recording = file.ok_or_else(|| Error::invalid(FILE, "`file` is missing"))?;
    Ok((object(&fields)?, recording))
}

/// The texts of a form as an object.
fn object(fields: &[(String, Vec<&str>)]) -> Result<JsonObject, Error> {
    let mut object = Builder::with_capacity(256);
    for (name, texts) in fields {
        match (rule(name), &texts[..]) {
            (_, texts) if name.ends_with("[]") => object.put(name, texts),
            // It has no effect here, as at other auxiliary endpoints.
            (Some(Rule::Read), _) => {}
            // vLLM reads it as JSON.
            (Some(Rule::PassesOpen(_)), [text]) => {
                let inner = JsonObject::parse_strictly(
                    Bytes::copy_from_slice(text.as_bytes()),
                    EXTENSIONS_MAX,
                    |_| Ok(()),
                );
                let message = || format!("`{name}` must be an object as JSON");
                inner.map_err(|_| Error::invalid(name.clone(), message()))?;
                object.put_with(name, |out| out.push_str(text.trim()));
            }
            (_, texts) => texts.iter().for_each(|text| object.put_text(name, text)),
        }
    }
    Ok(object.build())
}

/// A file's name without folders, in characters that every engine reads alike; the end of a long one,
/// which says the format.
fn plain_file_name(given: &str) -> String {
    let name = given.rsplit(['/', '\\']).next().unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || ".-_".contains(*c);
    let skipped = name.chars().count().saturating_sub(FILE_NAME_MAX_CHARS);
    let name = name.chars().skip(skipped).map(|c| if is_plain(&c) { c } else { '_' });
    let name: String = name.collect();
    if name.is_empty() { FILE.to_owned() } else { name }
}

impl Recording {
    /// The recording's load in tokens.
    pub fn weight_tokens(&self) -> u64 {
        (self.bytes.len() / BYTES_PER_TOKEN) as u64
    }

    /// The content type of the form for engines.
    pub fn content_type(&self) -> Option<HeaderValue> {
        HeaderValue::try_from(format!("multipart/form-data; boundary={}", self.boundary.0)).ok()
    }

    /// The form for engines: the members of an object as texts, and the recording, unchanged and not
    /// copied.
    pub fn write(&self, fields: &JsonObject) -> Parts {
        let boundary = &self.boundary.0;
        let mut head = String::with_capacity(fields.bytes() + 512);
        for (name, raw) in fields.members() {
            for text in texts(raw) {
                let about = "Content-Disposition: form-data";
                head.extend(["--", boundary, "\r\n", about, "; name=\"", name, "\"\r\n\r\n"]);
                head.extend([&*text, "\r\n"]);
            }
        }
        let file = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"{FILE}\"; filename=\"{}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n",
            self.file_name
        );
        let mut parts = Parts::default();
        parts.push((head + &file).into());
        parts.push(self.bytes.clone());
        parts.push(format!("\r\n--{boundary}--\r\n").into());
        parts
    }
}

/// The texts of a member: one, or those of a list.
fn texts(raw: &str) -> Vec<String> {
    match raw.as_bytes().first() {
        Some(b'"') => serde_json::from_str(raw).map_or_else(|_| Vec::new(), |text| vec![text]),
        Some(b'[') => serde_json::from_str(raw).unwrap_or_default(),
        _ => vec![raw.to_owned()],
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
