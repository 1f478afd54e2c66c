//! `splitrail replay` as people run it.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::built;

/// Three prompts of 1,000 tokens: the third one continues the first.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [7, 8]}
{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [5, 6]}
{"timestamp": 500, "input_length": 1000, "output_length": 1, "hash_ids": [7, 9]}
"#;

const CONFIG: &str = r#"
models:
  - name: m
    tokenizer: { kind: none }
    flow: prefill_first
    connector: nixl
    policy: { kind: round_robin }
    workers:
      - { id: p0, role: prefill, url: "http://127.0.0.1:1" }
      - { id: p1, role: prefill, url: "http://127.0.0.1:2" }
      - { id: d0, role: decode, url: "http://127.0.0.1:3" }
"#;

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.write("trace.jsonl", TRACE);
        files.write("splitrail.yaml", CONFIG);
        files
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).unwrap()
    }

    fn replay(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(built("splitrail"));
        let command = command.current_dir(self.path()).args(["replay", "--trace", "trace.jsonl"]);
        command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap()
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

#[test]
fn a_dump_has_what_the_model_says_to_the_nanosecond() {
    let files = Files::new();
    let arguments = ["--config", "splitrail.yaml", "--policy", "mooncake", "--dump", "rows.tsv"];
    let output = files.replay(&arguments);
    assert!(output.status.success(), "{output:?}");
    // 1,000 tokens: 10 ms + 85 ms + 1.15 ms; their transfer: 5 ms + 3.2768 ms. A step of one:
    // 15.1 ms + 30 ns x 1,000. The second joins at the first one's step's end, and that step of
    // two has 15.2 ms + 30 ns x 2,001. The third finds a block: 10 ms + 41.48 ms + 2.3 ns x
    // 488 x (512 + 244).
    assert_eq!(
        files.read("rows.tsv"),
        "req\tarrival_ns\tprefill_worker\thit_blocks\tprefill_start_ns\tprefill_end_ns\t\
         decode_worker\ttokens_moved\tkv_ready_ns\tfirst_token_ns\tlast_token_ns\trejected\n\
         0\t0\t0\t0\t0\t96150000\t0\t1000\t104426800\t119556800\t134816830\t0\n\
         1\t0\t1\t0\t0\t96150000\t0\t1000\t104426800\t134816830\t134816830\t0\n\
         2\t500000000\t0\t1\t500000000\t552328534\t0\t1000\t560605334\t575735334\t575735334\t0\n"
    );
}

#[test]
fn policies_and_loads_make_one_table_one_file_and_one_picture() {
    let files = Files::new();
    let output = files.replay(&[
        "--config",
        "splitrail.yaml",
        "--policy",
        "configured",
        "--policy",
        "dynamo",
        "--loads",
        "0.5,1",
        "--json",
        "out.json",
        "--svg",
        "out.svg",
    ]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let first: Vec<_> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(first, ["policy", "round_robin", "round_robin", "dynamo", "dynamo"]);
    let rows: Value = serde_json::from_str(&files.read("out.json")).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 4);
    assert_eq!((&rows[1]["load"], &rows[1]["requests"]), (&1.0.into(), &3.into()));
    assert!(files.read("out.svg").starts_with("<svg "));
}

#[test]
fn the_placement_of_a_request_is_explained() {
    let files = Files::new();
    let told = |policy: &str| {
        let explained = ["--policy", policy, "--explain", "2"];
        let output = files.replay(&[&["--config", "splitrail.yaml"], &explained[..]].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    // The third request finds the first one's block, whose 512 tokens take about 44 ms.
    let text = told("predicted_ttft");
    for said in [
        "request 2 under predicted_ttft: served by p",
        " and d0; 76 ms to the first token",
        "(extra work 54.8 less, prefill 43.8 less); it holds 1 of 2 blocks, p",
    ] {
        assert!(text.contains(said), "{text}");
    }
    assert!(told("dynamo").ends_with("only policies of a configuration can be explained\n"));
}

#[test]
fn two_configurations_are_compared() {
    let files = Files::new();
    files.write("other.yaml", &CONFIG.replace("round_robin", "least_loaded"));
    let output = files.replay(&["--compare", "splitrail.yaml", "other.yaml", "--json", "out.json"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("other.yaml: least_loaded against splitrail.yaml: round_robin"),
        "{text}"
    );
    let rows: Value = serde_json::from_str(&files.read("out.json")).unwrap();
    assert_eq!(rows[0].get("differences"), None);
    assert_eq!(rows[1]["differences"][0]["measure"], "TTFT mean, s");
}

#[test]
fn a_record_is_a_trace_of_its_own_block_size() {
    let files = Files::new();
    let line = r#"{"version": 1, "timestamp": 1700000000000, "input_length": 40, "output_length": 3,
        "hash_ids": [9007199254740991, 4], "block_size": 16, "decision": {"model": "m"}}"#;
    files.write("trace.jsonl", &line.replace('\n', " "));
    let output = files.replay(&["--config", "splitrail.yaml", "--serve", "m", "--json", "-"]);
    assert!(output.status.success(), "{output:?}");
    let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&rows[0]["policy"], &rows[0]["requests"]), (&"round_robin".into(), &1.into()));
}

/// A long prompt, a much longer one that continues it, and a third one that continues the first while
/// the second keeps its worker busy.
fn conversation() -> String {
    let line = |at: u64, blocks: &[u64]| {
        let input = blocks.len() * 512;
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": 2, \
             \"hash_ids\": {blocks:?}}}\n"
        )
    };
    let first: Vec<u64> = (0..20).collect();
    let [long, short] =
        [100..140, 200..201].map(|more| [&first[..], &more.collect::<Vec<_>>()].concat());
    [line(0, &first), line(2_000, &long), line(2_001, &short)].concat()
}

#[test]
fn a_configuration_s_fetches_and_costs_are_those_of_the_replay() {
    let files = Files::new();
    files.write("trace.jsonl", &conversation());
    let tokenizer = files.path().join("tokenizer");
    std::fs::create_dir(&tokenizer).unwrap();
    write_tokenizer(&tokenizer).unwrap();
    let fetching = CONFIG
        .replace("tokenizer: { kind: none }", "tokenizer: { kind: huggingface, path: tokenizer }")
        .replace("policy: { kind: round_robin }", "policy: { kind: predicted_ttft }");
    let replayed = |keys: &str, arguments: &[&str]| {
        let config = fetching.replace("connector: nixl", &format!("connector: nixl\n    {keys}"));
        files.write("fetching.yaml", &config);
        let output =
            files.replay(&[&["--config", "fetching.yaml", "--json", "-"], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
        rows[0].clone()
    };
    let fetched = |keys: &str, arguments: &[&str]| {
        replayed(keys, arguments)["loss"]["fetched_blocks"].as_u64().unwrap()
    };
    assert_eq!(fetched("peer_fetch: off", &[]), 0);
    assert_eq!(fetched("peer_fetch: off", &["--fetch"]), 20);
    assert_eq!(fetched("peer_fetch: two_step", &[]), 20);
    assert_eq!(fetched("peer_fetch: two_step\n    peer_fetch_min_tokens: 20000", &[]), 0);
    // 10,240 x 327,680 bytes take 33 s.
    let slow = "peer_fetch: two_step\n    costs: { bandwidth_gb_per_second: 0.1 }";
    assert_eq!(fetched(slow, &[]), 0);
    assert_eq!(fetched(slow, &["--bw", "1e11"]), 20, "the command line goes before");
    assert_eq!(fetched("peer_fetch: two_step\n    costs: { fetch_base_ms: 9000 }", &[]), 0);
    // Computing, steps and hand-offs take as long as configured.
    let ttft_s = |keys: &str| replayed(keys, &[])["ttft"]["mean_s"].as_f64().unwrap();
    assert!(ttft_s("costs: { prefill_us_per_token: 8500 }") > 20.0 * ttft_s("peer_fetch: off"));
}

#[test]
fn mistakes_are_reported_with_their_exit_code() {
    let files = Files::new();
    files.write("bad.yaml", "models: []\nmodel: 1\n");
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--policy", "best"], 64, "--policy best: not the name of a policy (random, "),
        (&["--trace", "none.jsonl"], 66, "none.jsonl"),
        (&["--trace", "splitrail.yaml"], 65, "splitrail.yaml: line 2: "),
        (&["--config", "bad.yaml"], 78, "bad.yaml:2:1"),
        (&["--config", "splitrail.yaml", "--serve", "x"], 78, "has no model x"),
    ];
    for (arguments, code, message) in cases {
        let mut command = Command::new(built("splitrail"));
        let command = command.current_dir(files.path()).arg("replay").args(arguments);
        if !arguments.contains(&"--trace") {
            command.args(["--trace", "trace.jsonl"]);
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(message), "{arguments:?}: {text}");
    }
}
