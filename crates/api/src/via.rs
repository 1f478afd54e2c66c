//! Which routers a request has come through, as the header `via` says (RFC 9110, section 7.6.3): a
//! worker's URL may lead back to a router.

use std::sync::OnceLock;

use http::{HeaderMap, HeaderValue, header};

use crate::error::{Error, ErrorKind};
use crate::text::random_id;

/// The beginning of the name that a router has in `via`.
const PREFIX: &str = "splitrail-";

/// Length of the rest of the name, in hexadecimal digits.
const ID_DIGITS: usize = 32;

/// Maximum number of routers that a request may come through.
const ROUTERS_MAX: usize = 8;

/// The name of this process in `via`.
pub fn own_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("{PREFIX}{}", random_id()))
}

/// The routers that a request has come through, as a value of `via`; `None` if it comes from none.
/// Other proxies are left out.
///
/// # Errors
/// A 508: the request has come through this router, or through too many.
pub fn passed(headers: &HeaderMap) -> Result<Option<HeaderValue>, Error> {
    let lists = headers.get_all(header::VIA).iter().filter_map(|value| value.to_str().ok());
    let mut passed = String::new();
    for (count, name) in lists.flat_map(|list| list.split(',')).filter_map(router).enumerate() {
        if name == own_name() {
            let message = "the request comes from this router: a worker's URL leads back to it";
            return Err(Error::new(ErrorKind::LoopDetected, message));
        }
        if count >= ROUTERS_MAX {
            let message = format!("the request has come through {ROUTERS_MAX} routers");
            return Err(Error::new(ErrorKind::LoopDetected, message));
        }
        passed.extend([if count == 0 { "1.1 " } else { ", 1.1 " }, name]);
    }
    // Names have letters, digits and `-` only, so the value is valid.
    Ok(Some(passed).filter(|passed| !passed.is_empty()).and_then(|passed| passed.try_into().ok()))
}

/// The name in an item of `via`, if it is that of a router.
fn router(item: &str) -> Option<&str> {
    let name = item.split_ascii_whitespace().nth(1)?;
    let id = name.strip_prefix(PREFIX)?;
    let is_id = id.len() == ID_DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then_some(name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(values: &[String]) -> Result<Option<HeaderValue>, ErrorKind> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::VIA, value.parse().unwrap());
        }
        passed(&headers).map_err(|error| error.kind())
    }

    #[test]
    fn a_request_that_comes_back_is_recognised_among_other_proxies() {
        let other = |digit: &str| format!("1.1 {PREFIX}{}", digit.repeat(ID_DIGITS));
        let own = format!("1.1 {}", own_name());
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["1.1 nginx, 2 splitrail-x (a, b)".into()]), Ok(None));
        let both = format!("{}, {}", other("a"), other("b"));
        let mixed = [format!("1.1 nginx, {}", other("a")), other("b")];
        assert_eq!(of(&mixed), Ok(Some(both.parse().unwrap())));
        for looped in [vec![own.clone()], vec![mixed[0].clone(), format!("{}, {own}", other("b"))]]
        {
            assert_eq!(of(&looped), Err(ErrorKind::LoopDetected));
        }
        assert!(of(&vec![other("c"); ROUTERS_MAX]).is_ok());
        assert_eq!(of(&vec![other("c"); ROUTERS_MAX + 1]), Err(ErrorKind::LoopDetected));
    }
}
