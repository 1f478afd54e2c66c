//! This repository keeps the rules.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::documents::{Texts, broken_links, cases, functions, tests, unknown_tests};
use super::reach::unreached;
use super::rules::{
    CRATE_MAX_LINES, Dependencies, FILE_MAX_LINES, impure, table, too_long, wide_cycles,
    workers_without_model, wrong_dependencies,
};
use super::sources::{Modules, code, module_of, shipped_lines};

/// A crate of the workspace.
struct Package {
    /// Its name without the project's.
    name: String,
    folder: PathBuf,
    /// The crates of the workspace that its shipped code depends on.
    uses: Vec<String>,
    /// Those that its tests depend on as well.
    all: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn short(name: &str) -> String {
    name.strip_prefix("splitrail-").unwrap_or(name).to_owned()
}

fn packages() -> Vec<Package> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let package = |package: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let own = |dependency: &&Value| dependency["path"].is_string();
        let all = package["dependencies"].as_array().unwrap().iter().filter(own);
        let uses = all.clone().filter(|dependency| dependency["kind"].is_null());
        Package {
            name: short(&text(&package["name"])),
            folder: PathBuf::from(text(&package["manifest_path"])).parent().unwrap().to_owned(),
            uses: uses.map(|dependency| short(&text(&dependency["name"]))).collect(),
            all: all.map(|dependency| short(&text(&dependency["name"]))).collect(),
        }
    };
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

/// The files of Rust under a folder, by their path below it.
fn rust_files(folder: &Path) -> Texts {
    files(folder, ".rs")
}

/// The files under a folder whose names end with `suffix`, by their path below it. Symbolic links are
/// not followed.
fn files(folder: &Path, suffix: &str) -> Texts {
    let mut files = Texts::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).unwrap() {
            let entry = entry.unwrap();
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let name = path.file_name().unwrap().to_string_lossy();
            if kind.is_dir() && name != "target" && !name.starts_with('.') {
                open.push(path);
            } else if kind.is_file() && name.ends_with(suffix) {
                let below = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                files.insert(below, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

fn modules(files: &Texts) -> Modules {
    files.iter().filter_map(|(file, text)| Some((module_of(file)?, code(text)))).collect()
}

fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n{}\n(the rules: ARCHITECTURE.md, Dependencies)", wrong.join("\n"));
}

#[test]
fn crates_depend_on_each_other_as_the_table_says() {
    let document = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let packages = packages().into_iter();
    let actual: Dependencies =
        packages.map(|package| (package.name, package.uses.into_iter().collect())).collect();
    assert_none(&wrong_dependencies(&table(&document), &actual));
}

#[test]
fn each_crate_uses_the_crates_that_it_depends_on() {
    let mut unused = Vec::new();
    for package in packages() {
        let mut text: String = rust_files(&package.folder).into_values().collect();
        if package.name == "tests" {
            // The suite `attacks` compiles them as well.
            text.extend(rust_files(&root().join("fuzz/checks")).into_values());
        }
        let is_unused =
            |used: &&String| !text.contains(&format!("splitrail_{}", used.replace('-', "_")));
        let of_package = package.all.iter().filter(is_unused);
        unused.extend(of_package.map(|used| format!("{} does not use {used}", package.name)));
    }
    assert_none(&unused);
}

#[test]
fn few_modules_import_each_other() {
    let packages = packages().into_iter();
    let wide = packages.flat_map(|package| {
        wide_cycles(&package.name, &modules(&rust_files(&package.folder.join("src"))))
    });
    assert_none(&wide.collect::<Vec<_>>());
}

#[test]
fn pure_crates_have_no_executor_clock_randomness_input_or_output() {
    let document = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let pure = table(&document).pure;
    assert!(!pure.is_empty(), "no crate is pure in the table");
    let packages = packages().into_iter().filter(|package| pure.contains(&package.name));
    let wrong = packages.flat_map(|package| {
        impure(&package.name, &modules(&rust_files(&package.folder.join("src"))))
    });
    assert_none(&wrong.collect::<Vec<_>>());
}

#[test]
fn tests_that_guard_the_movement_of_kv_exist() {
    let document = std::fs::read_to_string(root().join("docs/hand-offs.md")).unwrap();
    let section = document.split("\n## Guards and their tests\n").nth(1).unwrap();
    let rows = section.lines().take_while(|line| !line.starts_with("## "));
    let named = rows.filter(|line| line.starts_with("| ")).skip(1).flat_map(|row| {
        let tests = row.split('|').nth(2).unwrap_or_default();
        tests.split('`').skip(1).step_by(2).filter(|name| !name.contains('/'))
    });
    let named: Vec<&str> = named.collect();
    assert!(named.len() > 20, "{named:?}");
    let all: Vec<String> = ["tests/tests/flows", "crates/engine/tests", "crates/sim/tests"]
        .iter()
        .flat_map(|folder| rust_files(&root().join(folder)).into_values())
        .collect();
    let exists = |name: &str| all.iter().any(|text| text.contains(&format!("fn {name}()")));
    let missing: Vec<&str> = named.into_iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "docs/hand-offs.md names tests that do not exist: {missing:?}");
}

#[test]
fn tests_that_documents_name_exist() {
    let sources = rust_files(&root());
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
    let known: BTreeSet<&str> = sources.values().flat_map(|text| functions(text)).collect();
    let unknown = unknown_tests(&read("docs/security.md"), &known);
    assert!(unknown.is_empty(), "docs/security.md names tests that do not exist: {unknown:#?}");
}

#[test]
fn each_file_of_rust_is_compiled() {
    let manifests = files(&root(), "Cargo.toml");
    let packages = manifests.keys().filter_map(|file| file.strip_suffix("/Cargo.toml")).collect();
    let unreached = unreached(&rust_files(&root()), &packages);
    assert!(unreached.is_empty(), "\n{}", unreached.join("\n"));
}

#[test]
fn each_case_of_attack_has_a_test() {
    const FOLDER: &str = "tests/tests/attacks";
    let read = |file: &str| std::fs::read_to_string(root().join(file)).ok();
    let cases = cases(&read(&format!("{FOLDER}/README.md")).unwrap());
    assert!(cases.len() >= 40, "{FOLDER}/README.md has only {} cases", cases.len());
    let numbers = cases.iter().map(|case| case.number);
    assert!(numbers.eq(1..=cases.len()), "cases are numbered 1, 2, 3, ...: {cases:#?}");
    let without: Vec<_> = cases.iter().filter(|case| case.tests.is_empty()).collect();
    assert!(without.is_empty(), "cases without a test: {without:#?}");
    let missing = cases.iter().flat_map(|case| &case.tests).filter(|(file, test)| {
        // The files of the suite are named as they lie in its folder.
        let text = read(&format!("{FOLDER}/{file}")).or_else(|| read(file));
        !text.is_some_and(|text| tests(&text).contains(&**test))
    });
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "{FOLDER}/README.md names tests that do not exist: {missing:#?}");
}

#[test]
fn links_between_documents_lead_to_files_and_headings() {
    let documents = files(&root(), ".md");
    assert!(documents.len() > 40, "{:?}", documents.keys());
    let broken = broken_links(&documents, &|path| root().join(path).exists());
    assert!(broken.is_empty(), "broken links: {broken:#?}");
}

#[test]
fn crates_and_files_are_not_too_long() {
    let crates = packages().into_iter().filter_map(|package| {
        let files = rust_files(&package.folder.join("src")).into_iter();
        let shipped = files.filter(|(file, _)| module_of(file).is_some());
        let lines = shipped.map(|(_, text)| shipped_lines(&text).len()).sum();
        too_long(&format!("the crate `{}`", package.name), lines, CRATE_MAX_LINES)
    });
    let files = rust_files(&root()).into_iter();
    let files =
        files.filter_map(|(file, text)| too_long(&file, text.lines().count(), FILE_MAX_LINES));
    assert_none(&crates.chain(files).collect::<Vec<_>>());
}

#[test]
fn log_lines_that_name_a_worker_name_its_model() {
    let nameless = packages().into_iter().flat_map(|package| {
        let files = rust_files(&package.folder.join("src")).into_iter();
        let shipped = files.filter(|(file, _)| module_of(file).is_some());
        let name = package.name;
        shipped.flat_map(move |(file, text)| {
            workers_without_model(&format!("`{name}`, {file}"), &code(&text))
        })
    });
    let nameless: Vec<_> = nameless.collect();
    assert!(nameless.is_empty(), "\n{}", nameless.join("\n"));
}
