//! The parts of a form: RFC 2046, section 5.1, and RFC 7578. What these allow and no client needs is
//! refused: a preamble, an epilogue, white space behind a boundary, folded lines, nested parts.

use memchr::memmem;

use crate::error::{Error, ErrorKind};

/// Maximum number of parts.
const PARTS_MAX: usize = 64;

/// Maximum length in bytes of a part's head.
const HEAD_MAX_BYTES: usize = 2 << 10;

/// Maximum number of parameters of a header field.
const PARAMETERS_MAX: usize = 8;

/// A part of a form.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part<'a> {
    /// The name of the field: visible ASCII characters without `"` and `\`.
    pub(super) name: String,
    /// The name of the file, if the part is one.
    pub(super) file_name: Option<String>,
    pub(super) content: &'a [u8],
}

/// The error for a part, by its place from 1. What a client wrote in it is not named.
pub(super) fn wrong(place: usize, what: &str) -> Error {
    broken(&format!("cannot be read: its part {place} {what}"))
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::InvalidRequest, format!("the form {what}")).with_code("invalid_form")
}

/// The parts of a form.
///
/// # Errors
/// A 400 that says which part cannot be read.
pub(super) fn parts<'a>(body: &'a [u8], boundary: &str) -> Result<Vec<Part<'a>>, Error> {
    let delimiter = format!("\r\n--{boundary}").into_bytes();
    let finder = memmem::Finder::new(&delimiter);
    let mut rest = body
        .strip_prefix(&delimiter[2..])
        .ok_or_else(|| broken("does not begin with the boundary of its content type"))?;
    let mut parts = Vec::new();
    loop {
        let place = parts.len() + 1;
        match rest {
            b"--" | b"--\r\n" => return Ok(parts),
            [b'\r', b'\n', part @ ..] if place <= PARTS_MAX => {
                let end = finder.find(part);
                let end = end.ok_or_else(|| wrong(place, "does not end with the boundary"))?;
                parts.push(Part::read(&part[..end]).map_err(|what| wrong(place, what))?);
                rest = &part[end + delimiter.len()..];
            }
            [b'\r', b'\n', ..] => return Err(broken(&format!("has more than {PARTS_MAX} parts"))),
            _ => {
                return Err(wrong(
                    place,
                    "begins or ends with a boundary that has characters after it",
                ));
            }
        }
    }
}

impl<'a> Part<'a> {
    fn read(part: &'a [u8]) -> Result<Self, &'static str> {
        const END: &[u8] = b"\r\n\r\n";
        let end = memmem::find(&part[..part.len().min(HEAD_MAX_BYTES)], END);
        let end = end.ok_or("has no head of at most 2 KiB")?;
        let head = std::str::from_utf8(&part[..end]).map_err(|_| "has a head that is not UTF-8")?;
        let (mut disposition, mut has_type) = (None, false);
        for line in head.split("\r\n") {
            let (name, value) = line.split_once(':').ok_or("has a line in its head without `:`")?;
            if !is_token(name) || value.contains(|c: char| c.is_control() && c != '\t') {
                return Err("has a line in its head that is no header field");
            }
            let is = |other| name.eq_ignore_ascii_case(other);
            let value = value.trim_matches([' ', '\t']);
            if is("content-disposition") {
                if disposition.replace(value).is_some() {
                    return Err("has two `content-disposition`");
                }
            } else if is("content-type") {
                let kind = value.to_ascii_lowercase();
                if std::mem::replace(&mut has_type, true) || kind.starts_with("multipart/") {
                    return Err("has two `content-type`, or parts of its own");
                }
            } else if is("content-transfer-encoding") {
                let is_plain = ["binary", "8bit", "7bit"].contains(&&*value.to_ascii_lowercase());
                is_plain.then_some(()).ok_or("is encoded: send it as it is")?;
            }
        }
        let (name, file_name) = disposition
            .and_then(disposed)
            .ok_or("needs `content-disposition: form-data` with a plain `name`")?;
        Ok(Self { name, file_name, content: &part[end + END.len()..] })
    }
}

/// The name of the field and of the file in a `content-disposition`.
fn disposed(value: &str) -> Option<(String, Option<String>)> {
    let (kind, rest) = value.split_at(value.find(';')?);
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return None;
    }
    let (mut name, mut file_name, mut extended) = (None, None, None);
    for (key, value) in parameters(rest)? {
        match &*key {
            "name" => name = Some(value),
            "filename" => file_name = Some(value),
            // RFC 7578 forbids it; some clients send it beside `filename`, which counts.
            "filename*" => extended = Some(String::new()),
            _ => return None,
        }
    }
    let is_plain = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
    let name = name.filter(|name| !name.is_empty() && name.chars().all(is_plain))?;
    Some((name, file_name.or(extended)))
}

/// The parameters of a header field, behind its first word, with names in lower case; `None` if they
/// cannot be read, or one of them comes twice.
pub(super) fn parameters(mut text: &str) -> Option<Vec<(String, String)>> {
    const SPACE: [char; 2] = [' ', '\t'];
    let mut found: Vec<(String, String)> = Vec::new();
    loop {
        text = text.trim_start_matches(SPACE);
        if text.is_empty() {
            return Some(found);
        }
        let (name, rest) = text.strip_prefix(';')?.trim_start_matches(SPACE).split_once('=')?;
        let name = name.to_ascii_lowercase();
        let is_new = found.len() < PARAMETERS_MAX && found.iter().all(|(other, _)| *other != name);
        if !is_token(&name) || !is_new {
            return None;
        }
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let (value, rest) =
                    rest.split_at(rest.find([';', ' ', '\t']).unwrap_or(rest.len()));
                let is_word = !value.is_empty() && !value.contains('"');
                (is_word.then(|| value.to_owned())?, rest)
            }
        };
        found.push((name, value));
        text = rest;
    }
}

/// The text up to the closing quote, without its escapes, and what follows.
fn unquoted(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => text.push(chars.next()?.1),
            c => text.push(c),
        }
    }
    None
}

fn is_token(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_good)
}
