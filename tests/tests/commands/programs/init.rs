//! `splitrail init`.

use splitrail_sim::write_tokenizer;

use super::support::{Run, run};

/// Flags, and what the file has because of them.
const FILES: [(&[&str], &[&str]); 5] = [
    (&[], &["prefill:\n      - http://10.0.0.1:8000\n", "decode:\n      - http://10.0.1.1:8000\n"]),
    (
        &[
            "--model",
            "Qwen/Qwen3-8B",
            "--prefill",
            "10.0.0.1:8000,10.0.0.2:8000",
            "--decode",
            "http://d:8000",
        ],
        &[
            "name: Qwen/Qwen3-8B ",
            "prefill:\n      - http://10.0.0.1:8000\n      - http://10.0.0.2:8000\n",
            "decode:\n      - http://d:8000\n",
        ],
    ),
    (
        &["--model", "8b", "--worker", "http://a:1", "--worker", "https://[::1]:2"],
        &["name: \"8b\"", "workers:\n      - http://a:1\n      - \"https://[::1]:2\"\n"],
    ),
    (
        &["--model", "m", "--prefill", "p:1", "--decode", "d:1", "--worker", "w:1"],
        &["workers:\n      - http://w:1\n", "decode:\n      - http://d:1\n"],
    ),
    (&["--model", "say ${HI}: x # y"], &["name: \"say $${HI}: x # y\""]),
];

#[test]
fn every_file_passes_check() {
    for (flags, has) in FILES {
        let files = tempfile::tempdir().unwrap();
        let run = Run { folder: files.path(), ..Run::default() };
        let ran = run.with(&[&["init"], flags].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.stdout.contains("splitrail check --config splitrail.yaml"), "{ran:?}");
        let text = std::fs::read_to_string(files.path().join("splitrail.yaml")).unwrap();
        for part in has {
            assert!(text.contains(part), "{part}: {text}");
        }
        let checked = run.with(&["check", "--config", "splitrail.yaml"]);
        assert_eq!(checked.code, 0, "{checked:?}\n{text}");
        let printed = run.with(&[&["init", "--output", "-"], flags].concat());
        assert_eq!(printed.stdout, text.replace("--config splitrail.yaml", "--config FILE"));
    }
}

/// What users switch on by deleting `# ` is valid, too.
#[test]
fn the_keys_in_comments_are_valid() {
    let files = tempfile::tempdir().unwrap();
    let run = Run { folder: files.path(), ..Run::default() };
    let tokenizer = files.path().join("tokenizer");
    std::fs::create_dir(&tokenizer).unwrap();
    write_tokenizer(&tokenizer).unwrap();
    let ran = run.with(&["init", "--tokenizer", "tokenizer"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let path = files.path().join("splitrail.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(&format!("tokenizer: {}", tokenizer.display())), "{text}");
    let uncommented: String = text
        .lines()
        .map(|line| match line.trim_start().strip_prefix("# ") {
            Some(rest) if rest.starts_with("aliases:") => line.replacen("# ", "", 1) + "\n",
            _ => line.to_owned() + "\n",
        })
        .collect();
    assert_ne!(uncommented, text);
    std::fs::write(&path, uncommented).unwrap();
    let checked = run.with(&["check", "--config", "splitrail.yaml"]);
    assert_eq!(checked.code, 0, "{checked:?}");
}

#[test]
fn a_file_is_overwritten_only_by_force() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("mine.yaml");
    std::fs::write(&path, "mine\n").unwrap();
    let run = Run { folder: files.path(), ..Run::default() };
    let ran = run.with(&["init", "--output", "mine.yaml"]);
    assert_eq!(ran.code, 74, "{ran:?}");
    assert!(ran.stderr.contains("mine.yaml exists already") && ran.stderr.contains("--force"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine\n");
    assert_eq!(run.with(&["init", "--output", "mine.yaml", "--force"]).code, 0);
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("# Written by"));
}

#[test]
fn flags_that_make_no_configuration_write_nothing() {
    for (flags, code, told) in [
        (&["--prefill", "p:1", "--model", "m"][..], 64, "--decode"),
        (&["--worker", "w:1"], 64, "--model"),
        (&["--model", "m", "--worker", "http://u:s3cr3t@w:1"], 64, "user or password"),
        (&["--model", "m", "--worker", "w:1,w:1"], 78, "already"),
        (&["--tokenizer", "nowhere"], 78, "does not exist"),
        (&["--output", "no/folder/x.yaml"], 74, "no/folder/x.yaml"),
    ] {
        let files = tempfile::tempdir().unwrap();
        let ran = Run { folder: files.path(), ..Run::default() }.with(&[&["init"], flags].concat());
        assert_eq!(ran.code, code, "{flags:?}: {ran:?}");
        assert!(ran.stderr.contains(told), "{flags:?}: {ran:?}");
        assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 0, "{flags:?}");
    }
    assert_eq!(run(&["init", "--model", ""]).code, 78);
}
