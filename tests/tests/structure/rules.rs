//! The rules, each as a function from what is there to the violations that it finds: what is wrong,
//! and how to mend it.

use std::collections::{BTreeMap, BTreeSet};

use super::imports::{cycles, imports, named_paths};
use super::sources::Modules;

/// Files that may import each other in a cycle.
pub(super) const CYCLE_MAX_FILES: usize = 5;
/// Lines of code that ships, with its comments, in one crate.
pub(super) const CRATE_MAX_LINES: usize = 12_000;
/// Lines of a file of Rust.
pub(super) const FILE_MAX_LINES: usize = 600;

/// The paths that a pure crate does not name: executors, clocks, randomness, input and output.
const IMPURE_PATHS: [&str; 13] = [
    "tokio",
    "futures",
    "rand",
    "getrandom",
    "std::fs",
    "std::net",
    "std::io",
    "std::os",
    "std::process",
    "std::env",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];

/// Calls that read a clock or print without naming one of these paths.
const IMPURE_CALLS: [&str; 6] =
    ["Instant::now", "SystemTime::now", ".elapsed()", "print!(", "println!(", "dbg!("];

/// For each crate, the crates of this repository that it depends on.
pub(super) type Dependencies = BTreeMap<String, BTreeSet<String>>;

/// A table of dependencies, as ARCHITECTURE.md has it: the crate, what it depends on, whether it is
/// pure.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) dependencies: Dependencies,
    pub(super) pure: BTreeSet<String>,
}

/// Reads the table under the heading `## Dependencies`.
pub(super) fn table(document: &str) -> Table {
    let mut table = Table::default();
    let section = document.split("\n## Dependencies\n").nth(1).unwrap_or_default();
    for line in section.lines().take_while(|line| !line.starts_with("## ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, uses, notes] = cells[..] else { continue };
        let Some(name) = name.strip_prefix('`').and_then(|name| name.strip_suffix('`')) else {
            continue;
        };
        let uses = uses.split(',').map(|name| name.trim().trim_matches('`'));
        let uses = uses.filter(|name| !name.is_empty()).map(str::to_owned);
        table.dependencies.insert(name.to_owned(), uses.collect());
        if notes.starts_with("pure") {
            table.pure.insert(name.to_owned());
        }
    }
    table
}

/// The crates depend on each other as the table says.
pub(super) fn wrong_dependencies(table: &Table, actual: &Dependencies) -> Vec<String> {
    let none = BTreeSet::new();
    let mut wrong = Vec::new();
    for (name, uses) in actual {
        let Some(allowed) = table.dependencies.get(name) else {
            wrong.push(format!(
                "`{name}` is not in the table: add a line that says what it may depend on"
            ));
            continue;
        };
        for used in uses.difference(allowed) {
            wrong.push(format!(
                "`{name}` depends on `{used}`, which the table does not allow: move what it needs to a \
                 crate below both, or pass it as a value or a trait"
            ));
        }
        for unused in allowed.difference(uses) {
            wrong.push(format!(
                "the table allows `{name}` to depend on `{unused}`, which it does not: delete it"
            ));
        }
    }
    for name in table.dependencies.keys().filter(|name| !actual.contains_key(*name)) {
        wrong.push(format!("the table has `{name}`, which is no crate: delete the line"));
    }
    for name in &table.pure {
        let used = table.dependencies.get(name).unwrap_or(&none);
        for used in used.iter().filter(|used| !table.pure.contains(*used)) {
            wrong.push(format!("`{name}` is pure and depends on `{used}`, which is not"));
        }
    }
    wrong
}

/// No more than [`CYCLE_MAX_FILES`] modules of a crate import each other in a cycle.
pub(super) fn wide_cycles(crate_name: &str, modules: &Modules) -> Vec<String> {
    let cycles = cycles(&imports(modules)).into_iter();
    let wide = cycles.filter(|cycle| cycle.len() > CYCLE_MAX_FILES);
    wide.map(|cycle| {
        format!(
            "`{crate_name}`: {} modules import each other ({}), {CYCLE_MAX_FILES} may: move what they \
             share to a module that imports none of them",
            cycle.len(),
            cycle.join(", ")
        )
    })
    .collect()
}

/// A pure crate names no executor, clock, source of randomness, input or output.
pub(super) fn impure(crate_name: &str, modules: &Modules) -> Vec<String> {
    let mut wrong = Vec::new();
    for (module, code) in modules {
        let paths: Vec<String> = named_paths(code).iter().map(|path| path.join("::")).collect();
        let is_named = |impure: &str| {
            let below =
                |path: &String| path.strip_prefix(impure).map(|rest| rest.starts_with("::"));
            paths.iter().any(|path| path == impure || below(path) == Some(true))
        };
        let named = IMPURE_PATHS.iter().filter(|path| is_named(path));
        let called = IMPURE_CALLS.iter().filter(|call| code.contains(**call));
        for word in named.chain(called) {
            wrong.push(format!(
                "`{crate_name}` is pure, and its module `{module}` has `{word}`: let the caller pass the \
                 time, the random number or the data"
            ));
        }
    }
    wrong
}

/// Log lines of level `info` and above that name a worker also name its model: ids of workers are unique
/// in their model only.
pub(super) fn workers_without_model(file: &str, code: &str) -> Vec<String> {
    let names = |fields: &str, name: &str| {
        fields.split(|char: char| !char.is_alphanumeric() && char != '_').any(|word| word == name)
    };
    let calls = ["info", "warn", "error"].map(|level| format!("tracing::{level}!("));
    let calls = calls.iter().flat_map(|call| code.split(call.as_str()).skip(1));
    // The fields stand before the message.
    let fields = calls.map(|call| call.split('"').next().unwrap_or_default());
    let nameless = fields.filter(|fields| names(fields, "worker") && !names(fields, "model"));
    nameless
        .map(|fields| {
            let fields = fields.split_whitespace().collect::<Vec<_>>().join(" ");
            format!("{file}: a log line with `{fields}` does not say of which model the worker is")
        })
        .collect()
}

/// A crate's lines and a file's are bounded.
pub(super) fn too_long(what: &str, lines: usize, max_lines: usize) -> Option<String> {
    let hint = "split it by what its parts are for";
    (lines > max_lines)
        .then(|| format!("{what} has {lines} lines, {max_lines} are allowed: {hint}"))
}

#[cfg(test)]
mod planted {
    //! Violations that are planted are found.

    use super::super::sources::{code, module_of, shipped_lines};
    use super::*;

    const DOCUMENT: &str = "# A\n\n## Dependencies\n\n| crate | depends on | |\n|---|---|---|\n\
        | `index` | | pure |\n| `fleet` | `index` | |\n\n## Next\n\n| `x` | `y` | |\n";

    fn actual(crates: &[(&str, &[&str])]) -> Dependencies {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        crates.iter().map(|(name, uses)| ((*name).to_owned(), owned(uses))).collect()
    }

    fn modules(sources: &[(&str, &str)]) -> Modules {
        sources.iter().map(|(name, text)| ((*name).to_owned(), code(text))).collect()
    }

    #[test]
    fn a_dependency_that_the_table_does_not_allow_is_found() {
        let table = table(DOCUMENT);
        let good = actual(&[("index", &[]), ("fleet", &["index"])]);
        assert_eq!(wrong_dependencies(&table, &good), Vec::<String>::new());
        let back = actual(&[("index", &["fleet"]), ("fleet", &["index"])]);
        assert!(wrong_dependencies(&table, &back)[0].starts_with("`index` depends on `fleet`"));
        let unused = actual(&[("index", &[]), ("fleet", &[])]);
        assert!(wrong_dependencies(&table, &unused)[0].contains("which it does not"));
        let new = actual(&[("index", &[]), ("fleet", &["index"]), ("new", &[])]);
        assert!(wrong_dependencies(&table, &new)[0].starts_with("`new` is not in the table"));
        let gone = actual(&[("index", &[])]);
        assert!(wrong_dependencies(&table, &gone)[0].contains("is no crate"));
    }

    /// A ring of modules, each importing the next in one of the ways that there are.
    fn ring(files: usize) -> Modules {
        let name = |file: usize| format!("m{}", file % files);
        let import = |file: usize| match file % 3 {
            0 => format!("use crate::{};\nfn f() {{ {}::g() }}", name(file + 1), name(file + 1)),
            1 => format!("use super::{{\n    {}::{{A, B as C}},\n}};", name(file + 1)),
            _ => format!("fn f() -> crate::{}::A {{ todo() }}", name(file + 1)),
        };
        let mut modules: Modules = (0..files).map(|file| (name(file), import(file))).collect();
        modules.insert(String::new(), "mod m0;".to_owned());
        modules
    }

    #[test]
    fn a_cycle_of_six_files_is_found_and_one_of_five_is_allowed() {
        assert_eq!(wide_cycles("a", &ring(5)), Vec::<String>::new());
        let found = wide_cycles("a", &ring(6));
        assert!(
            found[0].contains("6 modules import each other (m0, m1, m2, m3, m4, m5)"),
            "{found:?}"
        );
    }

    #[test]
    fn a_name_that_is_re_exported_counts_where_it_is_defined() {
        let users = ["a", "b", "c", "d", "e"].map(|name| (name, "use crate::Shared;"));
        let root =
            ("", "pub use shared::Shared;\nuse a::A;\nuse b::B;\nuse c::C;\nuse d::D;\nuse e::E;");
        let all = [&users[..], &[root, ("shared", "pub struct Shared;")]].concat();
        assert_eq!(wide_cycles("x", &modules(&all)), Vec::<String>::new());
        let back = [&users[..], &[root, ("shared", "use crate::f;")]].concat();
        let back = modules(&back);
        assert!(wide_cycles("x", &back)[0].starts_with("`x`: 7 modules"), "{:?}", imports(&back));
    }

    #[test]
    fn tests_and_comments_count_for_nothing() {
        let text = "use crate::a;\n// use crate::b;\n#[cfg(test)]\n#[allow(x)]\nmod tests {\n    use crate::c;\n}\n\
                    #[cfg(test)]\nmod more;\nfn f() {}\n";
        assert_eq!(code(text), "use crate::a;\nfn f() {}");
        assert_eq!(shipped_lines(text).len(), 3);
        assert_eq!(module_of("index/tests.rs"), None);
        assert_eq!(module_of("index/tests/more.rs"), None);
        assert_eq!(module_of("index/line.rs").unwrap(), "index::line");
        assert_eq!(module_of("lib.rs").unwrap(), "");
    }

    #[test]
    fn a_clock_in_a_pure_crate_and_a_pure_crate_over_another_are_found() {
        let found = impure("index", &modules(&[("a", "fn f() { std::time::Instant::now(); }")]));
        assert!(found[0].contains("its module `a` has `std::time::Instant`"), "{found:?}");
        let document = DOCUMENT
            .replace("| `fleet` | `index` | |", "| `fleet` | `index` | pure |\n| `b` | | |");
        let document = document.replace("| `index` | | pure |", "| `index` | `b` | pure |");
        let actual = actual(&[("index", &["b"]), ("fleet", &["index"]), ("b", &[])]);
        let found = wrong_dependencies(&table(&document), &actual);
        assert_eq!(found, ["`index` is pure and depends on `b`, which is not"]);
    }

    #[test]
    fn impurity_is_found_in_any_way_of_writing_it() {
        for text in [
            "use std::{collections::BTreeMap, fs};",
            "use std::{\n    cmp::Ordering,\n    time::{Duration, Instant},\n};",
            "use std::time::SystemTime as Clock;",
            "use tokio;",
            "fn f() -> tokio::time::Sleep {}",
            "fn f() { std::env::var(\"A\"); }",
            "fn f(at: At) -> Duration { at.elapsed() }",
            "fn f() { println!(\"a\"); }",
        ] {
            let found = impure("index", &modules(&[("a", text)]));
            assert_eq!(found.len(), 1, "{text}: {found:?}");
        }
        for text in [
            "use std::time::Duration;",
            "use std::{sync::Arc, iter};",
            "use crate::random;",
            "// use std::fs;\nfn f() {}",
            "fn f(instant: u64) -> u64 { instant }",
        ] {
            assert_eq!(impure("index", &modules(&[("a", text)])), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn a_log_line_with_a_worker_of_an_unnamed_model_is_found() {
        let line = |fields: &str| format!("tracing::warn!(\n    {fields},\n    \"model: gone\");");
        let found = |fields: &str| workers_without_model("a.rs", &line(fields));
        for named in ["model, worker", "model = served.name(), worker = worker.id()", "%error"] {
            assert_eq!(found(named), Vec::<String>::new(), "{named}");
        }
        assert_eq!(
            found("worker = id,\n    leg"),
            ["a.rs: a log line with `worker = id, leg,` does not say of which model the worker is"]
        );
    }

    #[test]
    fn a_line_too_many_is_found() {
        assert_eq!(too_long("a.rs", 600, FILE_MAX_LINES), None);
        let found = too_long("a.rs", 601, FILE_MAX_LINES).unwrap();
        assert!(found.starts_with("a.rs has 601 lines, 600 are allowed"), "{found}");
    }
}
