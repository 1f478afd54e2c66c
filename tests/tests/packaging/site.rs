//! `release/site`: the documentation site has every document, and `llms.txt` is what it prints.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

fn site(args: &[&str]) -> std::process::Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    Command::new("python3").arg(root.join("release/site")).args(args).output().unwrap()
}

/// The documents below a folder.
fn documents(folder: &Path, below: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = format!("{below}{}", file.file_name().into_string().unwrap());
        if file.path().is_dir() {
            found.append(&mut documents(&file.path(), &format!("{name}/")));
        } else if name.ends_with(".md") {
            found.insert(name);
        }
    }
    found
}

#[test]
fn the_site_has_every_document_and_no_link_that_leaves_it_by_path() {
    let files = tempfile::tempdir().unwrap();
    let made = files.path().join("site");
    let status = site(&["--output", made.to_str().unwrap()]).status.code();
    assert!(matches!(status, Some(0 | 3)), "3: without mdBook there is its input; {status:?}");
    let summary = fs::read_to_string(made.join("src/SUMMARY.md")).unwrap();
    let named = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let named: BTreeSet<String> = named.map(str::to_owned).collect();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    assert_eq!(named, documents(&docs, ""));
    for page in named {
        let text = fs::read_to_string(made.join("src").join(&page)).unwrap();
        let up = format!("](../{}", if page.contains('/') { "../" } else { "" });
        assert!(!text.contains(&up), "{page}");
    }
}

#[test]
fn the_index_for_language_models_is_that_of_the_documents() {
    let printed = site(&["--llms"]);
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let kept = fs::read_to_string(root.join("llms.txt")).unwrap();
    let hint = "run `release/site --llms > llms.txt`";
    assert!(String::from_utf8(printed.stdout).unwrap() == kept, "{hint}");
}
