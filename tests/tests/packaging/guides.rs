//! The guides of newcomers: their commands are run as they are written, in an empty home folder of a
//! machine with the addresses of the guides and simulated engines in place of vLLM.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use splitrail_sim::write_tokenizer;
use splitrail_tests::binary::built;
use splitrail_tests::machine::{HOME, Machine};
use splitrail_tests::page::Page;

/// Starts what the arguments would start of vLLM, as a simulated engine. It knows the arguments that
/// the guides use, and needs those without which the guides do not work.
const VLLM: &str = r#"#!/bin/sh
set -eu
[ "$1" = serve ]
model=$2 details=false
shift 2
while [ $# -gt 0 ]; do
    case $1 in
    --port) port=$2; shift ;;
    --block-size) block=$2; shift ;;
    --kv-transfer-config) transfer=$2; shift ;;
    --kv-events-config) events=$2; shift ;;
    --enable-prefix-caching) cache=true ;;
    --enable-prompt-tokens-details) details=true ;;
    *) echo "vllm: unknown argument $1" >&2; exit 2 ;;
    esac
    shift
done
of() { printf %s "$1" | jq --exit-status --raw-output "$2"; }
[ "$cache" = true ] && [ "$details" = true ]
[ "$(of "$transfer" .kv_connector)" = NixlConnector ]
[ "$(of "$events" '"\(.enable_kv_cache_events) \(.publisher)"')" = "true zmq" ]
exec PROGRAM sim-engine --honour-threshold false --model "$model" --block-size "$block" \
    --host "$VLLM_NIXL_SIDE_CHANNEL_HOST" --http-port "$port" \
    --role "$(of "$transfer" '{kv_producer: "prefill", kv_consumer: "decode"}[.kv_role]')" \
    --kv-events-port "$(of "$events" '.endpoint | ltrimstr("tcp://*:")')" \
    --kv-replay-port "$(of "$events" '.replay_endpoint | ltrimstr("tcp://*:")')"
"#;

/// The host of the router in the guide about a first pair, and those of the engines: with a
/// tokenizer in the Hugging Face cache and in a folder, and without Splitrail.
fn machine() -> Option<Machine> {
    let machine = Machine::with_hosts(&["10.0.0.1", "10.0.1.1"])?;
    let cache = format!("{HOME}/.cache/huggingface/hub/models--Qwen--Qwen3-8B");
    machine.write(&format!("{cache}/refs/main"), "main");
    for folder in [format!("{cache}/snapshots/main"), "/models/qwen3-8b".to_owned()] {
        let folder = machine.path(&folder);
        fs::create_dir_all(&folder).unwrap();
        write_tokenizer(&folder).unwrap();
    }
    let program = built("splitrail").display().to_string();
    machine.command("vllm", &VLLM.replace("PROGRAM", &program));
    let pair = Page::read("first-pd-pair");
    let (prefill, decode) = pair.block("1. ", "vllm serve").split_once("\n\n").unwrap();
    machine.write("/root/prefill", prefill);
    machine.write("/root/decode", decode);
    Some(machine)
}

/// Starts the engines of the guide about a first pair as it says, and waits for them.
const ENGINES: &str = "
on 10.0.0.1 sh /root/prefill &
on 10.0.1.1 sh /root/decode &
until_ok curl -sf http://10.0.0.1:8000/health
until_ok curl -sf http://10.0.1.1:8000/health
";

/// Runs a command in the background, until `then` has run.
fn while_it_runs(command: &str, then: &str) -> String {
    let command = command.trim();
    format!("{command} &\nserver=$!\n{then}\nkill -KILL $server; wait $server || true\n")
}

/// The value of a header in replies that `curl -i` has printed.
fn header<'r>(replies: &'r str, name: &str) -> &'r str {
    let line = replies.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.unwrap_or_else(|| panic!("no {name} in\n{replies}"))
}

/// The names in a list of names and values.
fn names(list: &str, between: char, after: char) -> Vec<&str> {
    list.split(between).filter_map(|item| Some(item.split_once(after)?.0.trim())).collect()
}

#[test]
fn a_first_pair_is_started_checked_and_asked_as_the_guide_says() {
    let pair = Page::read("first-pd-pair");
    let Some(machine) = machine() else { return };
    machine.install(&built("splitrail"));
    machine.write(&format!("{HOME}/splitrail.yaml"), pair.block("2. ", "models:\n"));
    let ready = "until_ok curl -sf http://127.0.0.1:8000/ready";
    let request = pair.block("4. ", "curl -i");
    let explain = pair.block("4. ", "splitrail explain");
    let (explain, _) = explain.split_once("--request-id ").unwrap();
    let asked = format!(
        "{ready}
{curl}
request() {{ {request}}}
request >first
until request >next && grep -q 'try=served' next; do sleep 0.05; done
cat first; echo; echo ----; cat next; echo; echo ----
{explain} --request-id $(sed -n 's/^x-request-id: \\([0-9a-f]*\\).*/\\1/p' next)",
        curl = pair.line(3, "curl "),
    );
    let script = ENGINES.to_owned()
        + &while_it_runs(pair.block("2. ", "splitrail serve"), ready)
        + &format!("{} >checked || {{ cat checked; exit 1; }}\n", pair.line(3, "splitrail check"))
        + "cat checked; echo ----\n"
        + &while_it_runs(pair.line(3, "splitrail serve"), &asked);
    let printed = machine.run(&script);
    let parts: Vec<&str> = printed.split("----\n").collect();
    let [checked, first, next, explained] = parts[..] else { panic!("{printed}") };
    assert!(checked.trim_end().ends_with("splitrail.yaml: ok: 2 workers, 0 faults, 1 warning"));
    // What is said to be expected.
    assert!(checked.contains("warning: "), "{checked}");

    let shown = pair.block("4. ", "x-splitrail-route:");
    let shown = |name| header(shown, name);
    assert_eq!(header(first, "x-splitrail-route"), shown("x-splitrail-route"));
    let parts = names(shown("server-timing"), ',', ';');
    assert_eq!(names(header(first, "server-timing"), ',', ';'), parts);
    assert!(parts.contains(&"first_token"), "{parts:?}");
    let route = header(next, "x-splitrail-route");
    assert!(!names(route, ';', '=').contains(&"prefill"), "{route}");
    for grown in ["overlap_blocks=", "cached_tokens="] {
        assert!(route.contains(grown) && !route.contains(&format!("{grown}0")), "{route}");
    }
    assert!(explained.contains("* d0 "), "{explained}");
}

/// Makes a wheel and an archive of the programs of this build, whose size is not bounded.
fn package(to: &Path) -> PathBuf {
    const PACKAGE: &str = "
import gzip, sys
sys.path.insert(0, sys.argv.pop(1))
from artefacts import archive, contents
archive.compress = lambda data: gzip.compress(data, 1, mtime=0)
contents.PROGRAM_MAX_BYTES = 1 << 30
from artefacts import main
sys.exit(main.main())
";
    let made = Command::new("python3")
        .args(["-B", "-c", PACKAGE, concat!(env!("CARGO_MANIFEST_DIR"), "/../release")])
        .args(["--no-verify", "wheel", "tarball", "--output"])
        .arg(to)
        .arg("--programs")
        .arg(built("splitrail").parent().unwrap())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let files = fs::read_dir(to).unwrap().map(|file| file.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|end| end == "whl")).last().unwrap()
}

#[test]
fn wheel_and_archive_are_installed_and_the_service_is_set_up_as_the_guide_says() {
    let guide = Page::read("install");
    let Some(machine) = machine() else { return };
    let wheel = package(&machine.path(&format!("{HOME}/target/package")));
    let wheel = wheel.file_name().unwrap().to_string_lossy().into_owned();
    machine.command("systemctl", "#!/bin/sh\necho \"$@\" >>/root/systemctl\n");
    let published = format!(
        "splitrail-{}-py3-none-manylinux_2_28_{}.whl",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH
    );
    let here = guide.block("Wheel", "pip install").replace(&published, &wheel);
    assert!(here.contains(&wheel), "the wheel of the guide is not {published}");
    let ready = "until_ok curl -sf http://127.0.0.1:8000/ready";
    let ports =
        format!("{ready}\ncurl -sf http://127.0.0.1:9090/metrics | grep -c splitrail_build_info");
    let script = [
        // What it makes is there already.
        "mkdir release; echo '#!/bin/sh' >release/package; chmod +x release/package",
        guide.block("Get the artefacts", "SHA256SUMS"),
        &here,
        "kill -KILL $!; deactivate; echo",
        guide.block("Archive", "tar xzf"),
        "[ \"$(command -v splitrail)\" = /usr/local/bin/splitrail ]; splitrail-shim --version",
        &while_it_runs(guide.block("Try it without engines", "quickstart"), &ports),
        ENGINES,
        &format!(
            "cat >splitrail.yaml <<'END'\n{}END",
            guide.block("Write a configuration", "models:\n")
        ),
        guide.block("Write a configuration", "splitrail check"),
        guide.block("Write a configuration", "splitrail completions"),
        guide.block("Run it as a service", "useradd"),
        // As the unit starts it.
        "cd /; setpriv --reuid splitrail --regid splitrail --clear-groups \\
            /usr/bin/splitrail check --connect /etc/splitrail/splitrail.yaml",
        "cat /root/systemctl",
    ];
    let printed = machine.run(&script.join("\n"));
    assert!(printed.contains("\"choices\":[{"), "{printed}");
    assert!(printed.contains("splitrail.yaml: ok: 2 workers, 0 faults"), "{printed}");
    assert!(printed.ends_with("daemon-reload\nenable --now splitrail\n"), "{printed}");
}
