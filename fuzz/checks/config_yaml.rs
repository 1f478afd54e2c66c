//! The text of a configuration file.

use std::path::Path;

/// Holds the key and the tokenizer that the seeds name.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/config/tests/fixtures/config");

/// What is in the file of the key.
const KEY: &str = "fixture-engine-key";

pub(crate) fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let problems = match splitrail_config::parse("x.yaml", &text, Path::new(FOLDER)) {
        Ok(loaded) => loaded.warnings,
        Err(problems) => {
            assert!(problems.count() > 0, "a refusal has a reason");
            assert!(problems.as_slice().len() <= problems.count());
            problems.as_slice().to_vec()
        }
    };
    // YAML ends lines at any of `\n`, `\r` and `\r\n`.
    let lines = text.chars().filter(|c| matches!(c, '\n' | '\r')).count() + 1;
    let columns = text.chars().count() + 1;
    assert!(problems.is_sorted_by_key(|problem| (problem.line, problem.column)));
    for problem in problems {
        assert!((1..=lines + 1).contains(&problem.line), "{problem}");
        assert!((1..=columns).contains(&problem.column), "{problem}");
        assert!(!problem.message.is_empty() && !problem.hint.is_empty(), "{problem}");
        assert!(!problem.message.starts_with("the configuration is not valid"), "{problem}");
        let shown = problem.to_string().contains(KEY) && !text.contains(KEY);
        assert!(!shown, "a secret is shown");
    }
}
