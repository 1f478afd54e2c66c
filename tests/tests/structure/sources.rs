//! Rust sources as text: the code that ships, without tests and comments.

use std::collections::BTreeMap;

/// The shipped modules of a crate: each module's path (`a::b`, empty for the root) and its code.
pub(super) type Modules = BTreeMap<String, String>;

/// The module of a file under a crate's `src`; `None` for a file of tests.
pub(super) fn module_of(file: &str) -> Option<String> {
    let path: Vec<&str> = file.strip_suffix(".rs")?.split('/').collect();
    let is_test = |part: &&str| *part == "tests" || part.ends_with("_tests");
    if path.iter().any(is_test) {
        return None;
    }
    match path[..] {
        ["lib" | "main"] => Some(String::new()),
        _ => Some(path.join("::")),
    }
}

/// A file's lines without its modules of tests.
pub(super) fn shipped_lines(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let mut shipped = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        if lines[at].trim() != "#[cfg(test)]" {
            shipped.push(lines[at]);
            at += 1;
            continue;
        }
        // Further attributes, then one item: a line, or a block that ends at the same indent.
        at += 1;
        while at < lines.len() && lines[at].trim_start().starts_with("#[") {
            at += 1;
        }
        if lines.get(at).is_some_and(|line| line.trim_end().ends_with('{')) {
            let indent = lines[at].len() - lines[at].trim_start().len();
            let end = format!("{}}}", " ".repeat(indent));
            while at < lines.len() && lines[at].trim_end() != end {
                at += 1;
            }
        }
        at += 1;
    }
    shipped
}

/// The shipped code of a file, without lines of comments.
pub(super) fn code(text: &str) -> String {
    let lines = shipped_lines(text).into_iter();
    let code: Vec<&str> = lines.filter(|line| !line.trim_start().starts_with("//")).collect();
    code.join("\n")
}
