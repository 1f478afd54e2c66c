//! `version`, `completions` and `man` of both programs.

use serde_json::Value;

use super::support::{ROUTER, Run, SHIM};

#[test]
fn both_programs_tell_their_version_and_how_they_were_built() {
    for (program, feature) in [(ROUTER, Some("kubernetes")), (SHIM, None)] {
        let run = Run { program, ..Run::default() };
        let short = run.with(&["--version"]);
        assert!(short.stdout.starts_with(&format!("{program} ")), "{short:?}");
        let text = run.with(&["version"]);
        assert_eq!((text.code, short.code), (0, 0));
        let first = text.stdout.lines().next().unwrap();
        assert!(short.stdout.starts_with(first), "{first}, {short:?}");
        for what in ["commit ", "features ", "target ", "profile "] {
            assert!(text.stdout.lines().any(|line| line.starts_with(what)), "{text:?}");
        }
        let json: Value = serde_json::from_str(&run.with(&["version", "--json"]).stdout).unwrap();
        assert_eq!(json["program"], program);
        assert_eq!(first, format!("{program} {}", json["version"].as_str().unwrap()));
        assert!(json["features"].is_object() && json["target"].is_string(), "{json}");
        assert!(feature.is_none_or(|name| json["features"][name].is_boolean()), "{json}");
    }
}

#[test]
fn scripts_for_shells_complete_every_command() {
    for (program, command) in [(ROUTER, "quickstart"), (SHIM, "schema")] {
        let run = Run { program, ..Run::default() };
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            let ran = run.with(&["completions", shell]);
            assert_eq!(ran.code, 0, "{ran:?}");
            assert!(ran.stdout.contains(command) && ran.stdout.contains(program), "{shell}");
        }
        let ran = run.with(&["completions", "tcsh"]);
        assert_eq!(ran.code, 64, "{ran:?}");
        assert!(ran.stderr.contains("possible values"), "{ran:?}");
    }
}

#[test]
fn each_command_has_a_manual_page() {
    for (program, pages) in [
        (
            ROUTER,
            &["splitrail.1", "splitrail-serve.1", "splitrail-keys-new.1", "splitrail-man.1"][..],
        ),
        (SHIM, &["splitrail-shim.1", "splitrail-shim-check.1"]),
    ] {
        let files = tempfile::tempdir().unwrap();
        let run = Run { program, folder: files.path(), ..Run::default() };
        let page = run.with(&["man"]);
        assert_eq!(page.code, 0, "{page:?}");
        assert!(page.stdout.contains(".TH"), "{page:?}");
        let ran = run.with(&["man", "--output", "new/man1"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        for page in pages {
            let text = std::fs::read_to_string(files.path().join("new/man1").join(page)).unwrap();
            assert!(text.contains(".SH SYNOPSIS"), "{page}: {text}");
        }
        std::fs::write(files.path().join("file"), "").unwrap();
        let ran = run.with(&["man", "--output", "file/man1"]);
        assert_eq!(ran.code, 74, "{ran:?}");
        assert!(ran.stderr.contains("file/man1"), "{ran:?}");
    }
}
