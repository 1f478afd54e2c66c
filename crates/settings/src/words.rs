//! The texts of problems, and their differences between the programs.

use crate::tree::{Node, Value};

/// Maximum number of characters of a user's text in a message.
const SHOWN_MAX: usize = 60;

/// Maximum number of known words that are listed behind a similar one.
const KNOWN_MAX: usize = 12;

/// Properties of one program's file that differ from those of the other program.
#[derive(Clone, Copy, Debug)]
pub struct FileProfile {
    /// Whether values may name variables of the environment (`${NAME}`).
    pub variables: bool,
    /// Keys below which a secret may have been written by mistake: no message repeats the text
    /// there.
    pub secret_keys: &'static [&'static str],
    /// Hints for lists in which people write secrets in place of items: for values of the wrong type
    /// there, whose text no message repeats.
    pub hints: &'static [(&'static str, &'static str)],
    /// The hint for an empty file.
    pub empty: &'static str,
    /// The hint for a file that is too large.
    pub too_large: &'static str,
}

impl FileProfile {
    /// Whether values at `path` may be secrets.
    pub(crate) fn is_secret(&self, path: &str) -> bool {
        self.secret_keys.iter().any(|key| path.contains(key))
    }

    /// The hint for a value of the wrong type at `path`, if it has one of its own.
    pub(crate) fn hint(&self, path: &str) -> Option<&'static str> {
        let is_it = |key| {
            let item = path.strip_prefix(key);
            item.is_some_and(|item| {
                (item.is_empty() || item.starts_with('[')) && !item.contains('.')
            })
        };
        let of_path = |(key, _): &&(&'static str, &'static str)| is_it(*key);
        self.hints.iter().find(of_path).map(|(_, hint)| *hint)
    }

    /// The value found at `path`, as a noun phrase.
    pub(crate) fn found(&self, node: &Node, path: &str) -> String {
        match &node.value {
            Value::Null => "empty".to_owned(),
            Value::Seq(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
            _ if self.is_secret(path) || self.hint(path).is_some() => "a single value".to_owned(),
            Value::Bool(yes) => format!("{yes}"),
            Value::Int(number) => format!("the number {number}"),
            Value::Float(number) => format!("the number {number}"),
            Value::Str(text) => format!("the text \"{}\"", shown(text)),
        }
    }
}

/// A user's text in a form that is safe to print: short, and without control characters.
pub fn shown(text: &str) -> String {
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(SHOWN_MAX).flat_map(char::escape_debug).collect();
    if chars.next().is_some() { start + "..." } else { start }
}

/// The name of a path in messages; the empty path is the file itself.
pub(crate) fn place_name(path: &str) -> String {
    if path.is_empty() { "the configuration".to_owned() } else { format!("`{path}`") }
}

/// The path of a key below `path`.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// `did you mean X? ` if one of the known words is similar, followed by all known words unless they
/// are many.
pub(crate) fn suggest(word: &str, known: &[&str], what: &str) -> String {
    let all = known.join(", ");
    match closest(word, known) {
        Some(close) if known.len() > KNOWN_MAX => format!("did you mean `{close}`?"),
        Some(close) => format!("did you mean `{close}`? {what}: {all}"),
        None => format!("{what}: {all}"),
    }
}

fn closest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    // Long words are never similar, and comparing them would take long.
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
        .or_else(|| begun_by(&word, known))
}

/// The longest of the known words that begins a word, as `nixl` begins `NixlConnector`.
fn begun_by<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let begins = |candidate: &&&str| word.starts_with(&candidate.replace('_', ""));
    known
        .iter()
        .filter(|candidate| candidate.len() >= 3)
        .filter(begins)
        .max_by_key(|c| c.len())
        .copied()
}

/// The number of insertions, deletions, replacements and swaps of neighbours.
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
        let connectors = ["nixl", "nixl_push", "shared_storage"];
        assert_eq!(closest("NixlConnector", &connectors), Some("nixl"));
        assert_eq!(closest("NixlPushConnector", &connectors), Some("nixl_push"));
        assert_eq!(closest("SharedStorageConnector", &connectors), Some("shared_storage"));
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
