//! `splitrail init`.

use splitrail_sim::{SimConfig, SimEngine, write_tokenizer};

use super::support::{Ran, Run, run};

/// Flags, and what the file has because of them.
const FILES: [(&[&str], &[&str]); 9] = [
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
    (
        &[
            "--model",
            "m",
            "--prefill",
            "dns://prefill.llm:8000,p:1",
            "--decode",
            "dns://decode.llm:8001",
        ],
        &[
            "prefill:\n      - http://p:1\n",
            "        name: prefill.llm\n        port: 8000\n        role: prefill\n",
            "        name: decode.llm\n        port: 8001\n        role: decode\n",
        ],
    ),
    (
        &["--model", "m", "--kubernetes", "app=vllm,tier in (a, b)", "--port", "engine"],
        &[
            "selector: \"app=vllm,tier in (a, b)\"\n        port: engine\n",
            "flow: decode_first",
            "connector: nixl\n",
        ],
    ),
    (
        &["--model", "m", "--kubernetes", "app=vllm", "--namespace", "llm", "--role", "both"],
        &["namespace: llm\n        port: 8000\n        role: both\n"],
    ),
    (
        &["--model", "m", "--nats", "nats://n0:4222,nats://n1:4222", "--tokenizer", "none"],
        &[
            "events:\n  kind: nats\n  servers: [\"nats://n0:4222\", \"nats://n1:4222\"]\n",
            "      - kind: shim ",
            "flow: prefill_first",
        ],
    ),
];

/// Whether the build has not what the file asks for.
fn lacks_part(checked: &Ran) -> bool {
    checked.stderr.contains("build with `--features")
}

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
        assert!(checked.code == 0 || lacks_part(&checked), "{checked:?}\n{text}");
        let printed = run.with(&[&["init", "--output", "-"], flags].concat());
        assert_eq!(printed.stdout, text.replace("--config splitrail.yaml", "--config FILE"));
    }
}

#[test]
fn shims_get_a_token_that_is_kept_and_a_listener() {
    let files = tempfile::tempdir().unwrap();
    let run = Run { folder: files.path(), ..Run::default() };
    let flags = ["init", "--model", "m", "--kubernetes", "app=vllm", "--port", "shim", "--shims"];
    let ran = run.with(&flags);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stdout.contains("fleet.token: written"), "{ran:?}");
    let token = std::fs::read_to_string(files.path().join("fleet.token")).unwrap();
    assert_eq!(token.trim().len(), 64, "random");
    assert!(!format!("{ran:?}").contains(token.trim()), "the token is not shown");
    let text = std::fs::read_to_string(files.path().join("splitrail.yaml")).unwrap();
    for part in
        ["\n  fleet: 0.0.0.0:8002 ", "kind: file, path: fleet.token", "shim: true", "kind: shim"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let checked = run.with(&["check", "splitrail.yaml"]);
    assert!(checked.code == 0 || lacks_part(&checked), "{checked:?}");
    let again = run.with(&[&flags[..], &["--force"]].concat());
    assert!(again.stdout.contains("fleet.token: kept"), "{again:?}");
    assert_eq!(std::fs::read_to_string(files.path().join("fleet.token")).unwrap(), token);
    let printed = run.with(&[&flags[..], &["--output", "-"]].concat());
    assert_eq!(printed.code, 0, "there is a token already: {printed:?}");
    let elsewhere = tempfile::tempdir().unwrap();
    let run = Run { folder: elsewhere.path(), ..Run::default() };
    let printed = run.with(&[&flags[..], &["--output", "-"]].concat());
    assert!(printed.code == 64 && printed.stderr.contains("--output"), "{printed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_the_model_is_asked_of_the_engines() {
    let files = tempfile::tempdir().unwrap();
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let run = Run { folder: files.path(), ..Run::default() };
    let (dead, url) = ("127.0.0.1:9", engine.url());
    let port = url.rsplit_once(':').unwrap().1;
    for engines in [format!("{dead},{url}"), format!("dns://localhost:{port}")] {
        let flags = ["init", "--force", "--worker", &*engines];
        let ran = tokio::task::block_in_place(|| run.with(&flags));
        assert_eq!(ran.code, 0, "{ran:?}");
        let text = std::fs::read_to_string(files.path().join("splitrail.yaml")).unwrap();
        assert!(text.contains("- name: sim "), "{text}");
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
        (&["--kubernetes", "app=vllm"], 64, "--model"),
        (&["--model", "m", "--shims", "--nats", "nats://n:4222"], 64, "--nats"),
        (&["--model", "m", "--nats", "http://n:4222"], 78, "nats"),
        (&["--model", "m", "--worker", "dns://10.0.0.1:8000"], 64, "no DNS name"),
        (&["--model", "m", "--shims", "--worker", "w:1,w:1"], 78, "already"),
        (&["--worker", "127.0.0.1:9"], 69, "--model"),
        (&["--model", "m", "--worker", "http://u:s3cr3t@w:1"], 64, "user or password"),
        (&["--model", "m", "--worker", "w:1,w:1"], 78, "already"),
        (&["--tokenizer", "./nowhere"], 78, "does not exist"),
        (&["--tokenizer", "org/nowhere"], 78, "--download"),
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
