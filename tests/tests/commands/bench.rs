//! `splitrail bench` as people run it, against simulated engines.

use std::process::{Command, Output, Stdio};

use splitrail_sim::{RecordedRequest, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::binary::built;
use tempfile::TempDir;

/// Three workers, and a configuration for them.
struct Stand {
    engines: Vec<SimEngine>,
    files: TempDir,
}

impl Stand {
    async fn start() -> Self {
        let files = tempfile::tempdir().unwrap();
        write_tokenizer(files.path()).unwrap();
        let (mut engines, mut workers) = (Vec::new(), String::new());
        for number in 0..3 {
            let engine = SimEngine::start(SimConfig::default()).await.unwrap();
            workers += &format!(
                "      - {{ id: w{number}, role: both, url: \"{}\", kv_events: \"{}\", kv_replay: \"{}\" }}\n",
                engine.url(),
                engine.kv_events_endpoint().unwrap(),
                engine.kv_replay_endpoint().unwrap(),
            );
            engines.push(engine);
        }
        // A router in service has these listeners, files and keys.
        let config = format!(
            "listen: {{ http: 127.0.0.1:1, admin: 127.0.0.1:2 }}
ledger: {{ path: ledger.jsonl }}
auth: [ {{ kind: keys, file: keys.yaml }} ]
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    workers:
{workers}"
        );
        std::fs::write(files.path().join("splitrail.yaml"), config).unwrap();
        std::fs::write(files.path().join("keys.yaml"), "keys: []\n").unwrap();
        Self { engines, files }
    }

    async fn bench(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(built("splitrail"));
        command.args(["bench", "--config", "splitrail.yaml"]).args(arguments);
        command.current_dir(self.files.path()).env_remove("RUST_LOG").stdin(Stdio::null());
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }

    /// The requests of the load, which the probes of routers are not.
    fn load(&self) -> Vec<RecordedRequest> {
        let all = self.engines.iter().flat_map(SimEngine::requests);
        all.filter(|request| request.body["ignore_eos"] == true && request.body["stream"] == true)
            .collect()
    }
}

/// The cells of the line of a policy.
fn row<'a>(printed: &'a str, policy: &str) -> Vec<&'a str> {
    let mut lines = printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.find(|cells| cells.first() == Some(&policy)).unwrap_or_else(|| panic!("{printed}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_policies_serve_the_same_load_in_turns_and_the_one_that_knows_the_caches_hits_more() {
    let stand = Stand::start().await;
    let arguments = ["--requests", "60", "--concurrency", "3", "--picture", "bench.svg"];
    let output = stand.bench(&arguments).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let [ours, other] = ["predicted_ttft", "round_robin"].map(|policy| row(&printed, policy));
    assert_eq!((ours[1], ours[2]), ("60", "0"), "{printed}");
    assert_eq!((other[1], other[2]), ("60", "0"), "{printed}");
    let hits = |cells: &[&str]| -> f64 { cells[3].parse().unwrap() };
    assert!(hits(&ours) > hits(&other), "{printed}");
    assert!(printed.contains("predicted_ttft against round_robin: TTFT mean "), "{printed}");

    let load = stand.load();
    // Each policy has the load, and first a short turn that does not count.
    assert_eq!(load.len(), 2 * (60 + 3));
    // No turn finds the prompts of another one in a cache.
    let first_tokens =
        |request: &RecordedRequest| request.body["prompt"].to_string()[..60].to_owned();
    let turns: std::collections::BTreeSet<String> = load.iter().map(first_tokens).collect();
    assert_eq!(turns.len(), 2 * (4 + 1));

    let picture = std::fs::read_to_string(stand.files.path().join("bench.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("predicted_ttft"), "{picture}");
    assert!(!stand.files.path().join("ledger.jsonl").exists(), "the router's own ledger");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prompts_of_a_trace_keep_their_lengths_and_shared_prefixes() {
    let stand = Stand::start().await;
    let line = |length: u32, blocks: &str| {
        format!(
            "{{\"timestamp\": 0, \"input_length\": {length}, \"output_length\": 3, \
             \"hash_ids\": [{blocks}], \"block_size\": 16, \"decision\": {{\"model\": \"sim\"}}}}\n"
        )
    };
    let trace = line(40, "7, 8") + &line(60, "7, 8, 9");
    std::fs::write(stand.files.path().join("record.jsonl"), trace).unwrap();
    let arguments = ["--from", "record.jsonl", "--against", "none", "--concurrency", "1"];
    let output = stand.bench(&arguments).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(row(&printed, "predicted_ttft")[1..3], ["2", "0"], "{printed}");
    assert!(!printed.contains("against"), "{printed}");
    let load = stand.load();
    let lengths = load.iter().map(|request| request.body["prompt"].as_array().unwrap().len());
    let mut lengths: Vec<usize> = lengths.collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [40, 40, 60], "the first one twice: before the turns that count");
    assert!(load.iter().all(|request| request.body["max_tokens"] == 3));
}

#[tokio::test]
async fn what_cannot_be_measured_is_refused_with_a_hint() {
    let stand = Stand::start().await;
    for (arguments, code, hint) in [
        (&["--against", "best"][..], 64, "round_robin"),
        (&["--requests", "0"], 64, "--requests"),
        (&["--from", "nowhere.jsonl"], 66, "nowhere.jsonl"),
        (&["--from", "keys.yaml"], 65, "line 1"),
        (&["--model", "other"], 78, "no model other"),
    ] {
        let output = stand.bench(arguments).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(hint), "{arguments:?}: {said}");
    }
    assert_eq!(stand.load().len(), 0);
}
