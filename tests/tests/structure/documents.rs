//! What documents name exists: the targets of links, and tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

/// Texts by their path below the root of the repository.
pub(super) type Texts = BTreeMap<String, String>;

/// The links of Markdown documents whose file, folder or heading does not exist. `exists` says
/// whether there is a file or folder at a path below the root. Links to other hosts are not checked.
pub(super) fn broken_links(documents: &Texts, exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        documents.iter().map(|(document, text)| (document.as_str(), anchors(text))).collect();
    let mut broken = Vec::new();
    for (document, text) in documents {
        for (line, target) in links(text) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = beside(document, path);
            let what = match anchors.get(file.as_str()) {
                _ if !exists(&file) => "there is no such file",
                Some(anchors) if !anchor.is_empty() && !anchors.contains(anchor) => {
                    "the page has no such heading"
                }
                _ => continue,
            };
            broken.push(format!("{document}:{line}: `{target}`: {what}"));
        }
    }
    broken
}

/// The tests that a document names after `Test:` or `Tests:` and that do not exist. Names with
/// fewer than three underscores are those of modules.
pub(super) fn unknown_tests(document: &str, known: &BTreeSet<&str>) -> Vec<String> {
    let lists = document.lines().filter_map(|line| {
        let (_, list) = line.split_once("Tests: ").or_else(|| line.split_once("Test: "))?;
        Some(list)
    });
    let quoted = lists.flat_map(|list| list.split('`').skip(1).step_by(2));
    let names = quoted.map(|path| path.rsplit("::").next().unwrap_or(path));
    let is_test = |name: &&str| name.matches('_').count() >= 3 && name.chars().all(is_of_name);
    let unknown = names.filter(is_test).filter(|name| !known.contains(name));
    unknown.map(str::to_owned).collect()
}

/// A row of a table of cases: its number, and what it names as proof.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) number: usize,
    /// A file, and the name of a test in it.
    pub(super) tests: Vec<(String, String)>,
}

/// The rows of a table that begin with a number. Of their last cell, a word in backticks that ends in
/// `.rs` is a file, and every other one is a test in the file before it.
pub(super) fn cases(document: &str) -> Vec<Case> {
    let rows = document.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix('|')?.trim_end_matches('|').split('|').collect();
        let number = cells.first()?.trim().parse().ok()?;
        let mut case = Case { number, ..Case::default() };
        let mut file = "";
        for word in cells.last()?.split('`').skip(1).step_by(2) {
            match word.ends_with(".rs") {
                true => file = word,
                false => case.tests.push((file.to_owned(), word.to_owned())),
            }
        }
        Some(case)
    });
    rows.collect()
}

/// The names of the tests of a Rust source: functions after an attribute that ends in `test`, or in
/// `test` with arguments.
pub(super) fn tests(text: &str) -> BTreeSet<&str> {
    let mut tests = BTreeSet::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if let Some(attribute) = line.strip_prefix("#[") {
            let name = attribute.split(['(', ']']).next().unwrap_or_default();
            is_test |= name == "test" || name.ends_with("::test");
        } else if !line.starts_with("//") {
            let names = if is_test { functions(line).next() } else { None };
            tests.extend(names);
            is_test = false;
        }
    }
    tests
}

/// The names of the functions of a Rust source.
pub(super) fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.split("fn ").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !is_of_name(c))?;
        (end > 0).then_some(&rest[..end])
    })
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The lines of a document that are not in a block of code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((index + 1, line))
    })
}

/// The targets of a document's links to this repository, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let links = prose(text).flat_map(|(number, line)| {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.map(move |target| (number, target))
    });
    links.filter(|(_, target)| {
        let is_elsewhere = target.contains("://") || target.starts_with("mailto:");
        !is_elsewhere && !target.contains(char::is_whitespace)
    })
}

/// The path of a link below the root; an empty link is the document itself.
pub(super) fn beside(document: &str, link: &str) -> String {
    if link.is_empty() {
        return document.to_owned();
    }
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(name) => parts.push(name.to_str().unwrap_or_default()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    parts.join("/")
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let Some((_, heading)) =
            line.split_once("# ").filter(|(marks, _)| marks.chars().all(|mark| mark == '#'))
        else {
            continue;
        };
        let slug: String = without_targets(heading)
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let numbered = (1..).map(|number| format!("{slug}-{number}"));
        let free = std::iter::once(slug.clone()).chain(numbered);
        anchors.extend(free.into_iter().find(|anchor| !anchors.contains(anchor)));
    }
    anchors
}

/// A heading with the texts of its links and without their targets.
fn without_targets(heading: &str) -> String {
    let mut parts = heading.trim().split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, rest| text + rest.split_once(')').map_or(rest, |(_, rest)| rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[(&str, &str)]) -> Texts {
        texts.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    fn broken(page: &str) -> Vec<String> {
        let documents = texts(&[
            ("docs/page.md", page),
            ("README.md", "# Start\n## The `first_run`, [in short](docs/page.md)\n## Start\n"),
        ]);
        broken_links(&documents, &|path| {
            documents.contains_key(path) || matches!(path, "docs" | "" | "docs/a.png")
        })
    }

    #[test]
    fn a_link_to_a_file_that_does_not_exist_is_found() {
        assert_eq!(
            broken("text\n[a](a.png) and [b](../docs/none.md#b)"),
            ["docs/page.md:2: `../docs/none.md#b`: there is no such file"]
        );
    }

    #[test]
    fn a_link_to_a_heading_that_does_not_exist_is_found() {
        assert_eq!(
            broken("# Here\n[a](#here) [b](#there) [c](../README.md#start-2)"),
            [
                "docs/page.md:2: `#there`: the page has no such heading",
                "docs/page.md:2: `../README.md#start-2`: the page has no such heading",
            ]
        );
    }

    #[test]
    fn headings_have_the_anchors_that_github_gives_them() {
        let page = "[a](../README.md#the-first_run-in-short) [b](../README.md#start-1)";
        assert_eq!(broken(page), Vec::<String>::new());
    }

    #[test]
    fn examples_and_links_to_other_hosts_are_not_checked() {
        let page =
            "```\n[a](none.md)\n# no heading\n```\n[b](https://none.example/#c) `a[0](1 2)`\n";
        assert_eq!(broken(page), Vec::<String>::new());
        assert_eq!(broken(&format!("{page}[c](#no-heading)")).len(), 1);
    }

    #[test]
    fn a_test_that_a_document_names_and_that_does_not_exist_is_found() {
        let document = "`splitrail_a_b_total` grows. Tests: `a::one_that_is_there`, `a::one_that_is_not`, \
                        `tests/a_b_c_d.rs`, `some_module`.\nTest: `nor_is_this_one`.\n";
        let found = unknown_tests(document, &BTreeSet::from(["one_that_is_there"]));
        assert_eq!(found, ["one_that_is_not", "nor_is_this_one"]);
    }

    #[test]
    fn a_table_of_cases_names_files_and_their_tests() {
        let table = "| case | safe | tests |\n|---|---|---|\n| 1 | `a.rs` | `a/b.rs`: `c`, `d`; \
                     `e.rs`: `f` |\n| 2 | x | none |\n";
        let named = |tests: &[(&str, &str)]| {
            tests.iter().map(|(file, test)| ((*file).to_owned(), (*test).to_owned())).collect()
        };
        let first = named(&[("a/b.rs", "c"), ("a/b.rs", "d"), ("e.rs", "f")]);
        let both = [Case { number: 1, tests: first }, Case { number: 2, tests: Vec::new() }];
        assert_eq!(cases(table), both);
    }

    #[test]
    fn only_functions_that_are_tests_are_found() {
        let source = "#[test]\nfn a() {}\n#[tokio::test(flavor = \"x\")]\n#[allow(y)]\n\
                      /// Says.\n    async fn b() {}\nfn c() {}\n#[allow(x)]\nfn d() {}\n";
        assert_eq!(tests(source), BTreeSet::from(["a", "b"]));
    }
}
