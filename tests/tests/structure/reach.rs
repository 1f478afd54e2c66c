//! Which files of Rust the compiler reads. Cargo compiles only what a `mod` leads to from a root: a
//! file of tests that none names is never run, and nothing else says so.

use std::collections::BTreeSet;

use super::documents::{Texts, beside};

/// A file that the compiler reads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source {
    file: String,
    /// Whether its modules lie beside it, as those of roots do. Otherwise they lie in the folder that
    /// is named after it.
    has_modules_beside: bool,
}

/// The files of Rust that no `mod` reaches from a root. `packages` are the folders with a
/// `Cargo.toml`, below the root of the repository.
pub(super) fn unreached(sources: &Texts, packages: &BTreeSet<&str>) -> Vec<String> {
    let roots = sources.keys().filter(|file| is_root(file, packages));
    let roots = roots.map(|file| Source { file: file.clone(), has_modules_beside: true });
    let mut open: Vec<Source> = roots.collect();
    let mut reached = BTreeSet::new();
    while let Some(source) = open.pop() {
        if reached.insert(source.clone()) {
            let found = modules(&source, &sources[&source.file]).into_iter();
            open.extend(found.filter(|module| sources.contains_key(&module.file)));
        }
    }
    let reached: BTreeSet<&String> = reached.iter().map(|source| &source.file).collect();
    let unreached = sources.keys().filter(|file| !reached.contains(file));
    unreached
        .map(|file| format!("{file} is never compiled: name it by a `mod` in the file above it"))
        .collect()
}

/// Whether Cargo compiles a file without being led to it.
fn is_root(file: &str, packages: &BTreeSet<&str>) -> bool {
    let mut folders = file.rmatch_indices('/').map(|(at, _)| &file[..at]);
    let Some(package) = folders.find(|folder| packages.contains(folder)) else {
        return false;
    };
    let below: Vec<&str> = file[package.len() + 1..].split('/').collect();
    matches!(
        below[..],
        ["build.rs"]
            | ["src", "lib.rs" | "main.rs"]
            | ["src", "bin", _]
            | ["tests" | "examples" | "benches" | "fuzz_targets", _]
            | ["tests", _, "main.rs"]
    )
}

/// Where the modules that a file declares may be: `NAME.rs` and `NAME/mod.rs`, or the path of the
/// attribute.
fn modules(source: &Source, text: &str) -> Vec<Source> {
    let folder = match source.has_modules_beside {
        true => source.file.rsplit_once('/').map_or("", |(folder, _)| folder),
        false => source.file.trim_end_matches(".rs"),
    };
    let mut modules = Vec::new();
    let mut path = None;
    for line in text.lines().map(str::trim) {
        if let Some(attribute) = line.strip_prefix("#[path = \"") {
            path = attribute.split('"').next();
        } else if let Some(name) = module_name(line) {
            let at = |file: String, has_modules_beside| Source { file, has_modules_beside };
            match path.take() {
                Some(path) => modules.push(at(beside(&source.file, path), true)),
                None => modules.extend([
                    at(format!("{folder}/{name}.rs"), false),
                    at(format!("{folder}/{name}/mod.rs"), true),
                ]),
            }
        }
    }
    modules
}

/// The module that a line declares to be in a file of its own.
fn module_name(line: &str) -> Option<&str> {
    let (before, name) = line.strip_suffix(';')?.rsplit_once("mod ")?;
    let is_visibility = before.is_empty() || before.starts_with("pub");
    (is_visibility && !name.contains(|c: char| !c.is_alphanumeric() && c != '_')).then_some(name)
}

#[cfg(test)]
mod planted {
    //! Files that are planted without a `mod` are found.

    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        let found = unreached(&sources, &BTreeSet::from(["a", "tests"])).into_iter();
        found.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    }

    #[test]
    fn a_file_of_tests_that_no_module_names_is_found() {
        let main = |text| ("tests/tests/attacks/main.rs", text);
        let new = ("tests/tests/attacks/new.rs", "#[test]\nfn a() {}\n");
        assert_eq!(found(&[main("mod new;\n"), new]), Vec::<String>::new());
        for without in ["", "// mod new;\n", "mod newer;\n", "mod new {}\n", "use new;\n"] {
            assert_eq!(found(&[main(without), new]), ["tests/tests/attacks/new.rs"], "{without}");
        }
    }

    #[test]
    fn a_module_of_a_file_that_is_not_reached_is_not_reached() {
        let files = [
            ("a/src/lib.rs", "pub(crate) mod b;\n#[cfg(test)]\nmod tests;\n"),
            ("a/src/b.rs", "pub mod c;\n"),
            ("a/src/b/c.rs", ""),
            ("a/src/c.rs", ""),
            ("a/src/tests.rs", ""),
            ("a/src/d.rs", "mod e;\n"),
            ("a/src/d/e.rs", ""),
        ];
        assert_eq!(found(&files), ["a/src/c.rs", "a/src/d.rs", "a/src/d/e.rs"]);
    }

    #[test]
    fn a_module_with_a_path_is_reached_there() {
        let files = [
            ("a/tests/one.rs", "#[path = \"one/two.rs\"]\nmod two;\nmod support;\n"),
            ("a/tests/one/two.rs", "mod three;\n"),
            ("a/tests/one/three.rs", ""),
            ("a/tests/one/four.rs", ""),
            ("a/tests/support/mod.rs", "mod five;\n"),
            ("a/tests/support/five.rs", ""),
            ("b/tests/six.rs", ""),
        ];
        assert_eq!(found(&files), ["a/tests/one/four.rs", "b/tests/six.rs"]);
    }
}
