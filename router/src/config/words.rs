//! The words that problems are told in.

use super::tree::{Node, Value};

/// Characters of a user's text that a message repeats.
const SHOWN_MAX: usize = 60;

/// Keys that the configuration's design names, but this version cannot act on.
const LATER_KEYS: [&str; 7] =
    ["cache_isolation", "discovery", "events", "queue", "record", "tenants", "tls"];

/// The same for values: the key that they belong to, and the value.
const LATER_VALUES: [(&str, &str); 3] =
    [("tokenizer", "engine"), ("policy", "power_of_two"), ("policy", "predicted_ttft")];

/// Whether `key` is for a later version.
pub(super) fn is_later_key(key: &str) -> bool {
    LATER_KEYS.contains(&key)
}

/// Whether `value` of the key that ends `path` is for a later version.
pub(super) fn is_later_value(path: &str, value: &str) -> bool {
    let key = path.rsplit('.').next().unwrap_or(path);
    LATER_VALUES.contains(&(key, value))
}

/// A user's text in a form that is safe to print: short, and without control characters.
pub(super) fn shown(text: &str) -> String {
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(SHOWN_MAX).flat_map(char::escape_debug).collect();
    if chars.next().is_some() { start + "..." } else { start }
}

/// Whether values at `path` may be secrets, which no message repeats.
pub(super) fn is_secret(path: &str) -> bool {
    path.contains("engine_api_key") || path.contains("fleet.token")
}

/// What was found, as a noun phrase.
pub(super) fn found(node: &Node, path: &str) -> String {
    match &node.value {
        Value::Null => "empty".to_owned(),
        Value::Seq(_) => "a list".to_owned(),
        Value::Map(_) => "a mapping".to_owned(),
        _ if is_secret(path) => "a single value".to_owned(),
        Value::Bool(yes) => format!("{yes}"),
        Value::Int(number) => format!("the number {number}"),
        Value::Float(number) => format!("the number {number}"),
        Value::Str(text) => format!("the text \"{}\"", shown(text)),
    }
}

/// The name of a place in messages: the file itself has no path.
pub(super) fn place_name(path: &str) -> String {
    if path.is_empty() { "the configuration".to_owned() } else { format!("`{path}`") }
}

/// `path` and a key below it.
pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// `did you mean X? ` where one of the known words is close, then the known words.
pub(super) fn suggest(word: &str, known: &[&str], what: &str) -> String {
    let all = known.join(", ");
    match closest(word, known) {
        Some(close) => format!("did you mean `{close}`? {what}: {all}"),
        None => format!("{what}: {all}"),
    }
}

fn closest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    // Long words are never close, and would take long to compare.
    if word.len() > 64 {
        return None;
    }
    let word = word.to_lowercase().replace('-', "_");
    known
        .iter()
        .map(|candidate| (distance(&word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min()
        .map(|(_, candidate)| candidate)
}

/// The number of characters to insert, delete, replace or swap with their neighbour.
fn distance(left: &str, right: &str) -> usize {
    let left: Vec<char> = left.chars().collect();
    let right: Vec<char> = right.chars().collect();
    let mut before_last = vec![0; right.len() + 1];
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for (row, from) in left.iter().enumerate() {
        let mut current = vec![row + 1; right.len() + 1];
        for (column, to) in right.iter().enumerate() {
            let replaced = last[column] + usize::from(from != to);
            let mut best = replaced.min(last[column + 1] + 1).min(current[column] + 1);
            let swapped = row > 0
                && column > 0
                && left[row - 1] == *to
                && right[column - 1] == *from
                && from != to;
            if swapped {
                best = best.min(before_last[column - 1] + 1);
            }
            current[column + 1] = best;
        }
        before_last = std::mem::replace(&mut last, current);
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_words_are_suggested_and_distant_ones_are_not() {
        let known = ["timeouts", "tokenizer", "retries", "role"];
        assert_eq!(closest("timeout", &known), Some("timeouts"));
        assert_eq!(closest("tokeniser", &known), Some("tokenizer"));
        assert_eq!(closest("retires", &known), Some("retries"));
        assert_eq!(closest("Role", &known), Some("role"));
        assert_eq!(closest("bananas", &known), None);
    }

    #[test]
    fn distances_count_edits() {
        for (left, right, edits) in
            [("", "abc", 3), ("abc", "abc", 0), ("abc", "acb", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(left, right), edits);
            assert_eq!(distance(right, left), edits);
        }
    }
}
