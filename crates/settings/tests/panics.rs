//! What a program that logs through `logging::init` reports of a panic.
#![allow(missing_docs, clippy::unwrap_used)]

use std::process::Command;

use splitrail_settings::logging::{self, LevelFilter, LogFormat};

/// Set in the process that panics.
const CHILD: &str = "SPLITRAIL_TEST_PANICS";

#[test]
fn a_panic_is_logged_by_its_place_and_quotes_no_content() {
    if std::env::var_os(CHILD).is_some() {
        return panic_with_content();
    }
    for (format, backtrace) in [("text", "0"), ("json", "1")] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_panic_is_logged_by_its_place_and_quotes_no_content"])
            .args(["--nocapture", "--test-threads=1"])
            .envs([(CHILD, format), ("RUST_LOG", "trace"), ("RUST_BACKTRACE", backtrace)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr).into_owned()
            + &String::from_utf8_lossy(&child.stdout);
        assert_eq!(said.matches("panicked; please report this").count(), 2, "{said}");
        assert!(said.contains("panics.rs:"), "{said}");
        assert!(!said.contains("PromptMarker"), "{said}");
        assert_eq!(said.contains("panic_with_content"), backtrace == "1", "{said}");
    }
}

fn panic_with_content() {
    let json = std::env::var(CHILD).unwrap() == "json";
    logging::init(if json { LogFormat::Json } else { LogFormat::Text }, LevelFilter::INFO, &[]);
    let prompt = String::from("PromptMarker é");
    let cut = prompt.clone();
    // The standard library quotes a text that is cut within a character, and an error that is
    // unwrapped.
    assert!(std::thread::spawn(move || cut[..14].len()).join().is_err());
    assert!(std::thread::spawn(move || refused(prompt).unwrap()).join().is_err());
}

fn refused(prompt: String) -> Result<(), String> {
    Err(prompt)
}
