//! The syntax of Kubernetes labels and label selectors.

/// Maximum length of a name and of a value.
const NAME_MAX: usize = 63;
/// Maximum length of a key's prefix, which is a DNS name.
const PREFIX_MAX: usize = 253;

/// Checks a label selector: a list, separated by commas, of `KEY`, `!KEY`, `KEY=VALUE`,
/// `KEY==VALUE`, `KEY!=VALUE`, `KEY in (VALUE, ...)` and `KEY notin (VALUE, ...)`. The error
/// follows the text in a sentence.
pub(super) fn selector(text: &str) -> Result<(), &'static str> {
    let mut rest = text;
    loop {
        let end = requirement_end(rest).ok_or("has a parenthesis without its other one")?;
        requirement(rest[..end].trim())?;
        match rest[end..].strip_prefix(',') {
            Some(next) => rest = next,
            None => return Ok(()),
        }
    }
}

/// The end of the first requirement: a comma outside parentheses, or the end of the text.
fn requirement_end(text: &str) -> Option<usize> {
    let mut inside = false;
    for (at, c) in text.char_indices() {
        match (c, inside) {
            ('(', false) => inside = true,
            (')', true) => inside = false,
            ('(' | ')', _) => return None,
            (',', false) => return Some(at),
            _ => {}
        }
    }
    (!inside).then_some(text.len())
}

fn requirement(text: &str) -> Result<(), &'static str> {
    let (key, values) = if let Some(list) = text.strip_suffix(')') {
        let (left, list) = list.split_once('(').ok_or("has a parenthesis without its other one")?;
        let (key, word) = left.trim().rsplit_once(char::is_whitespace).ok_or("has no operator")?;
        if !matches!(word, "in" | "notin") {
            return Err("has parentheses that do not follow `in` or `notin`");
        }
        (key, list.split(',').collect())
    } else if let Some(key) = text.strip_prefix('!') {
        (key, Vec::new())
    } else if let Some((key, value)) = text.split_once("!=") {
        (key, vec![value])
    } else if let Some((key, value)) = text.split_once('=') {
        (key, vec![value.strip_prefix('=').unwrap_or(value)])
    } else {
        (text, Vec::new())
    };
    if !is_key(key.trim()) {
        return Err("has something that is not a label's key");
    }
    let valid = values.iter().all(|value| value.trim().is_empty() || is_name(value.trim()));
    if valid { Ok(()) } else { Err("has something that is not a label's value") }
}

/// Whether `text` is a label's key: a name, or `PREFIX/NAME`.
pub(super) fn is_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_prefix(prefix) && is_name(name),
        None => is_name(text),
    }
}

fn is_prefix(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let label = |label: &str| is_name(label) && label.chars().all(allowed);
    text.len() <= PREFIX_MAX && text.split('.').all(label)
}

fn is_name(text: &str) -> bool {
    let ends = |c: char| c.is_ascii_alphanumeric();
    text.len() <= NAME_MAX
        && text.starts_with(ends)
        && text.ends_with(ends)
        && text.chars().all(|c| ends(c) || matches!(c, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_those_of_kubernetes() {
        for text in [
            "app",
            "!app",
            "app=vllm",
            "app==vllm",
            "app!=vllm",
            "app=",
            "app = vllm , splitrail.io/role in (prefill,decode)",
            "tier notin (a, b),x.y-z/Name_0=A.b_C-d",
        ] {
            assert_eq!(selector(text), Ok(()), "{text}");
        }
        for text in [
            "",
            "app=vllm,",
            ",app",
            "app vllm",
            "app=a b",
            "app in a",
            "app in (a",
            "app)",
            "=a",
            "app on (a)",
            "(a)",
            "-app",
            "app-",
            "a/b/c",
            "A.com/b",
            "app in ((a))",
            "é=1",
        ] {
            assert!(selector(text).is_err(), "{text}");
        }
        assert!(!is_key(&"a".repeat(64)));
        assert!(is_key(&format!("{}/{}", "a".repeat(63), "a".repeat(63))));
    }
}
