//! Finds secrets in what a program has said.

use serde_json::json;

/// A text as it stands, as bytes in a list, as hex, and escaped.
fn forms(text: &str) -> Vec<String> {
    let list: Vec<_> = text.bytes().map(|byte| byte.to_string()).collect();
    let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![text.to_owned(), list.join(", "), hex];
    forms.extend([
        text.escape_debug().to_string(),
        json!(text).to_string().trim_matches('"').to_owned(),
    ]);
    forms
}

/// Notes in `found` each secret that something said has in it, in any form.
pub fn leaks(place: &str, said: &str, secrets: &[String], found: &mut Vec<String>) {
    for secret in secrets {
        for form in forms(secret) {
            if let Some(at) = said.find(&form) {
                let line_start = said[..at].rfind('\n').map_or(0, |end| end + 1);
                let line: String = said[line_start..]
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .chars()
                    .take(250)
                    .collect();
                let count = said.matches(&form).count();
                found.push(format!("{place} has {secret:?} ({count} times): {line}"));
                break;
            }
        }
    }
}

/// Characters that a library writes one line each, put together again.
pub fn spelled(log: &str) -> String {
    log.lines()
        .filter_map(|line| {
            let (_, quoted) = line.split_once("Replacing char '")?;
            quoted.chars().next()
        })
        .collect()
}
